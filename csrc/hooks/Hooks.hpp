// Hooks of users, called before and after every operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "device/WorkerStream.hpp"
#include "operation/OpName.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

// An operation that is about to be launched.
struct PreHookArgs {
  OpName name = OpName::all_reduce;
  uint64_t opId = 0;  // counts the hooked operations of this process, from 1
  bool async = false;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::optional<int> root;
  std::optional<int> peer;  // kAnyPeer for a receive from any rank
  std::string reduceOp;     // such as "SUM"; empty without a reduction
  std::vector<int64_t> inputSplits;
  std::vector<int64_t> outputSplits;
  std::vector<std::shared_ptr<PreHookArgs>> ops;  // a batch's members, with the batch's opId
  // of a split or shrink: the new group's members, as ranks of this group
  std::vector<int64_t> ranks;
  std::string newName;  // the new group's name
};

// An operation that is over for its caller: it has returned or raised (if synchronous), ended (if
// asynchronous), or was cancelled.
struct PostHookArgs {
  OpName name = OpName::all_reduce;
  uint64_t opId = 0;
  c10::intrusive_ptr<c10d::Work> work;  // null if the caller got no Work
  std::exception_ptr error;             // the operation's error, or null
  bool apart = false;                   // in a separate thread: no caller gets what hooks raise

  // Makes the Work of a synchronous operation that has succeeded and whose caller got none, if a
  // hook asks for one. May be null.
  using MakeWork = std::function<c10::intrusive_ptr<c10d::Work>()>;
  MakeWork finished;
};

// An operation that has ended.
struct EndHookArgs {
  OpName name = OpName::all_reduce;
  uint64_t opId = 0;
  bool async = false;
  std::exception_ptr error;
  Clock::duration duration{};
};

// The hooks of a communicator. Hooks of one kind are called in the order in which they were added.
// Hooks may add and remove hooks. An operation calls the pre and post hooks that exist at its
// launch, and, if it was launched with end hooks, those that exist at its end. Thread-safe.
class Hooks {
 public:
  using Pre = std::function<void(const std::shared_ptr<PreHookArgs>&)>;
  using Post = std::function<void(const std::shared_ptr<PostHookArgs>&)>;
  using End = std::function<void(const std::shared_ptr<EndHookArgs>&)>;
  using Abort = std::function<void()>;
  using Id = uint64_t;

  template <class Hook>
  using List = std::vector<std::pair<Id, std::shared_ptr<const Hook>>>;
  struct Table {
    List<Pre> pre;
    List<Post> post;
    List<End> end;
    List<Abort> abort;
  };

  // Returns whether there are pre, post or end hooks. Without them, an operation pays only for this
  // check.
  bool any() const { return any_.load(std::memory_order_relaxed); }

  Id add(Pre hook) { return insert(&Table::pre, std::move(hook)); }
  Id add(Post hook) {
    thread_.start();
    return insert(&Table::post, std::move(hook));
  }
  Id add(End hook) {
    thread_.start();
    return insert(&Table::end, std::move(hook));
  }
  Id addAbort(Abort hook) { return insert(&Table::abort, std::move(hook)); }

  // Removes a hook. Has no effect if no hook has the id any more.
  void remove(Id id);
  void clear();

  // Returns the current hooks.
  std::shared_ptr<const Table> table() const;

  // Calls the end hooks for an operation of a HookedCall, and the post hooks if it is asynchronous.
  // `work`: the operation's, or null.
  void tellEnd(
      const Operation& op, c10d::Work* work, const std::exception_ptr& error,
      Clock::time_point started, Clock::time_point finished);
  // Runs `body` between pre and post hooks. `body`, such as finalize, starts no HookedCall.
  void run(const std::shared_ptr<PreHookArgs>& before, const std::function<void()>& body);
  static std::shared_ptr<PreHookArgs> argsOf(const PreparedOp& call, uint64_t id);

  // Waits until the hooks of all finished operations have run.
  void drain() { thread_.drain(); }

  // Returns a new id, for the next operation.
  static uint64_t nextOpId();

 private:
  template <class Hook>
  Id insert(List<Hook> Table::* list, Hook hook);
  void replace(std::shared_ptr<const Table> table) REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::atomic<bool> any_{false};
  Id last_ GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const Table> table_ GUARDED_BY(mutex_) = std::make_shared<Table>();
  WorkerStream thread_{"tcpg_hooks"};  // started with the first post or end hook
};

// An operation whose pre hooks were called, and whose end has not been reported to hooks yet.
struct HookedOperation {
  OpName name;
  uint64_t id;
  std::shared_ptr<const Hooks::Table> table;  // hooks when it was issued
  std::atomic<bool> told{false};              // whether the post hooks were called
};

// The pre and post hooks of one operation, while its caller starts it.
class HookedCall {
 public:
  HookedCall(Hooks& hooks, PreparedOp& call);

  const std::shared_ptr<PreHookArgs>& args() const { return args_; }

  // Calls the pre hooks.
  void before() const;
  // Calls the post hooks of a synchronous operation, or of one that was not started. Then raises
  // `error`, the exception of before() or of the start, or the first exception of a post hook.
  void after(
      c10::intrusive_ptr<c10d::Work> work, std::exception_ptr error,
      PostHookArgs::MakeWork finished) const;

 private:
  const std::shared_ptr<const Hooks::Table> table_;
  const std::shared_ptr<PreHookArgs> args_;
  std::shared_ptr<HookedOperation> started_;  // null if tellEnd() has nothing to call
};

template <class Hook>
Hooks::Id Hooks::insert(List<Hook> Table::* list, Hook hook) {
  auto entry = std::make_shared<const Hook>(std::move(hook));
  // The old table is freed after the lock is released: the last reference to a hook may run a
  // user's destructor.
  std::shared_ptr<const Table> old;
  LockGuard lock(mutex_);
  auto table = std::make_shared<Table>(*table_);
  (table.get()->*list).emplace_back(++last_, std::move(entry));
  old = std::move(table_);
  replace(std::move(table));
  return last_;
}

}  // namespace torchcomms_pg
