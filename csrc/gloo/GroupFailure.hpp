// The failure of a group whose ranks are on several hosts, and how the ranks notify each other.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "base/Mutex.hpp"
#include "gloo/InterruptibleWait.hpp"
#include "host/NcclError.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg::gloo {

// Keeps the group's first failure, whose ranks are numbered in the group. A connection that breaks
// or cannot be made does not prove that the peer is at fault. Thread-safe.
class GroupFailure : public std::enable_shared_from_this<GroupFailure> {
 public:
  // `rank`: this process's rank. `died` returns a rank's name and how its process has ended, or ""
  // if the process may still run.
  GroupFailure(
      c10::intrusive_ptr<c10d::Store> store, int rank, std::function<std::string(int rank)> died)
      : store_(std::move(store)), rank_(rank), died_(std::move(died)) {}

  std::optional<host::NcclError> known() const;
  // Throws the failure if the group has failed.
  void check() const;

  // Sets the failure, unless the group has failed before. Callable from any thread; does not block.
  void fail(const host::NcclError& failure);

  // Fails the group if a signal handler raises in the calling thread.
  void lookForSignals();
  // Fails the group because a signal has interrupted this rank.
  void failInterrupted();
  // Fails the group because this rank cannot start a thread to connect. `name`: its name in errors.
  void failWithoutThread(const std::string& name, const std::system_error& error);

  // Does what `changed`.wait() does, but also returns after a failure, and checks for signals.
  // `lock` holds `mutex`.
  void wait(
      std::condition_variable& changed, Mutex& mutex, UniqueLock& lock,
      const std::function<bool()>& done) REQUIRES(mutex) {
    while (!changed.wait_for(lock, kSignalLook, [&] { return done() || known(); })) {
      const Unlocked unlocked(mutex);
      lookForSignals();
    }
  }

  // Raises the group's failure, which is `inside` unless the group has failed before. `inside`: a
  // failure among the ranks of this host. `members`: the numbers of these ranks in the group.
  [[noreturn]] void raiseFor(const host::NcclError& inside, const std::vector<int>& members);
  // Fails the group with `inside`, whose ranks index `members`.
  void adopt(const host::NcclError& inside, const std::vector<int>& members);

  // Fails the group with the failure that another rank has encoded in `told`. Returns false if
  // `told` is no encoded failure.
  bool failAsTold(const std::string& told);
  // Does the same with the value of `key` in the group's store. Returns false if `key` does not
  // exist.
  bool failAsWritten(c10d::Store& store, const std::string& key);
  // Does the same with the store's key for the group's failure. Also returns false if the store is
  // gone.
  bool failAsOthers(c10d::Store& store);

  // What this rank knows of ranks with which its connection is broken or cannot be made.
  struct Lost {
    std::vector<int> silent;  // ranks that do not answer, although the store does
    bool store = true;        // false if the store is gone
  };
  // Waits until the group fails with another rank's reason or the death of one of `ranks`, and
  // returns nullopt. After 2 s, or 5 s if a rank has not answered or the store is gone, returns
  // what is known of `ranks`. `ask`: asks `ranks` through the store whether they still run.
  std::optional<Lost> awaitReason(const std::vector<int>& ranks, bool ask);
  // If another rank has asked in the group's store whether this rank still runs, answers there.
  void answer(c10d::Store& group) const;

  // Sets a key of the group's store and announces it, in another thread. Waits for that thread, at
  // most as long as awaitTold() may. If no thread can be started, ranks wait for the key until
  // their deadline.
  void write(std::string key, std::string text);

  // Sets how announce() reaches the other ranks, and by which connection this rank uses the store.
  // Announces what was to be announced before.
  void announceBy(Announcements by);
  // After a write to the group's store, makes all ranks look there (Comm::probe). May block, and
  // raises the store's errors.
  void announce();
  // Calls `body` with the group's store, in the calling thread. May block, and raises the store's
  // errors. Uses the connection of Announcements, if it is known: in the group's own, a thread of
  // the program may block for long. `body` must not call announce() or inStore().
  void inStore(const std::function<void(c10d::Store& group)>& body) const;

  // Actions at a failure; each may be empty. `release` runs in the thread that fails the group.
  // `tell` runs in another thread and may block for a moment; `told` follows when the reason has
  // been written, or writing it has failed. awaitReason() calls `learn` repeatedly: `learn` fails
  // the group with a reason that the owner knows. In its first call (`first`), it also asks other
  // ranks to look.
  struct Actions {
    std::function<void()> release = {};
    std::function<void()> tell = {};
    std::function<void()> told = {};
    std::function<void(bool first)> learn = {};
  };
  // Adds actions for the life of `owner`. They are not called for an earlier failure.
  void watch(const std::shared_ptr<void>& owner, Actions actions);

  // After a failure, waits until the other ranks can read the reason: otherwise they would see only
  // broken connections. Waits for at most 5 s, or 0.2 s soon after such a timeout in any group.
  void awaitTold();

 private:
  struct Watcher {
    std::weak_ptr<void> owner;
    Actions actions;
  };

  void tellOthers();
  std::chrono::milliseconds answerPatience() const;
  template <class... Args>
  void call(std::function<void(Args...)> Actions::* which, Args... args);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const std::function<std::string(int rank)> died_;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  std::optional<host::NcclError> failure_ GUARDED_BY(mutex_);
  // The list never changes, so that telling a failure needs no memory for a copy.
  std::shared_ptr<const std::vector<Watcher>> watchers_ GUARDED_BY(mutex_) =
      std::make_shared<const std::vector<Watcher>>();
  // The other ranks can read the reason, or writing it has failed.
  bool told_ GUARDED_BY(mutex_) = false;
  Announcements announcements_ GUARDED_BY(mutex_);  // empty before announceBy()
  bool unannounced_ GUARDED_BY(mutex_) = false;     // announce() was called before announceBy()
};

}  // namespace torchcomms_pg::gloo
