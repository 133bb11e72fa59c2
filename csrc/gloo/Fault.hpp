// The failure of a group whose ranks are on several hosts, and how they tell each other of it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "gloo/SignalWatch.hpp"
#include "host/NcclError.hpp"

namespace torchcomms_pg::gloo {

// Thread-safe. Set once: the first failure stands. Ranks are the group's own. A connection that
// breaks, or cannot be made, is no proof against the rank at its other end.
class Fault : public std::enable_shared_from_this<Fault> {
 public:
  // `rank`: this process's.
  // `died`: Returns how a rank's process has ended, such as "rank 3 (pid 5) died"; "": it may run.
  Fault(c10::intrusive_ptr<c10d::Store> store, int rank, std::function<std::string(int rank)> died)
      : store_(std::move(store)), rank_(rank), died_(std::move(died)) {}

  std::optional<host::NcclError> known() const;
  // Throws the failure, if there is one.
  void check() const;

  // Sets the failure. Callable from any thread; does not block.
  void fail(const host::NcclError& failure);

  // Fails if the handler of a signal, which runs in the calling thread, raises.
  void lookForSignals();
  void failInterrupted();
  // Fails because this rank, which is called `name`, needs a thread to be connected.
  void failWithoutThread(const std::string& name, const std::system_error& error);

  // Same as `changed`.wait(), but also ends at a failure, and looks for signals meanwhile.
  template <class Done>
  void wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Done done) {
    while (!changed.wait_for(lock, kSignalLook, [&] { return done() || known(); })) {
      lock.unlock();
      lookForSignals();
      lock.lock();
    }
  }

  // Raises the group's failure, if there is one, or else `inside`, which has failed among ranks of
  // this host; `members`: their numbers in the group.
  [[noreturn]] void raiseFor(const host::NcclError& inside, const std::vector<int>& members);
  // Fails with it.
  void adopt(const host::NcclError& inside, const std::vector<int>& members);

  // Fails with the reason that another rank has written; false: none has, or the store is gone.
  bool failAsTold(c10d::Store& store);

  // What is known of ranks that this one has lost the connection to, or cannot be connected with.
  struct Lost {
    std::vector<int> silent;  // those that do not answer, while the store does
    bool store = true;        // false: the store is gone
  };
  // Waits for the reason. None: the group has failed with it, as with the death of one of `ranks`.
  // `ask`: asks the ranks through the store whether they are there, for which theirs have to look.
  std::optional<Lost> awaitReason(const std::vector<int>& ranks, bool ask);
  // Answers that this rank is there, if another one has asked. Through the caller's own connection.
  void answer(c10d::Store& group) const;

  // Writes something into the group's store and announces it; blocks as awaitTold() does. Where no
  // thread can be started for that, ranks that wait for it do so until the deadline.
  void write(std::string key, std::string text);

  // Make the ranks of all hosts look soon for what this one has written in the group's store, and
  // count how often ranks have done so.
  static void announce(c10d::Store& group) { group.add(kNewsKey, 1); }
  static int64_t news(c10d::Store& group) {
    return group.check({kNewsKey}) ? group.add(kNewsKey, 0) : 0;  // adding would make the key
  }

  // Actions at a failure. `release` runs in the failing thread; then in another thread `tell`,
  // which may block for a moment, and `told`, when the other ranks can read the reason. `learn`
  // runs a few times in a thread that waits for the reason, and fails the group with one that the
  // owner knows; the first time it makes others look for one. Each may be empty.
  struct Actions {
    std::function<void()> release = {};
    std::function<void()> tell = {};
    std::function<void()> told = {};
    std::function<void(bool first)> learn = {};
  };
  // Adds actions for the life of `owner`. Nothing is called if the failure came before.
  void watch(const std::shared_ptr<void>& owner, Actions actions);

  // Returns, after a failure, when the others can read the reason, or after 5 s, which all groups
  // of the process share. Otherwise the others would know of a broken connection alone.
  void awaitTold();

 private:
  static constexpr const char* kNewsKey = "news";

  struct Watcher {
    std::weak_ptr<void> owner;
    Actions actions;
  };

  bool readReason(c10d::Store& store);
  void tellOthers();
  template <class... Args>
  void call(std::function<void(Args...)> Actions::* which, Args... args);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const std::function<std::string(int rank)> died_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<host::NcclError> failure_;
  std::vector<Watcher> watchers_;
  bool told_ = false;  // true also when given up
};

}  // namespace torchcomms_pg::gloo
