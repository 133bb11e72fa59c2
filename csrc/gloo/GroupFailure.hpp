// The failure of a group whose ranks are on several hosts, and how the ranks notify each other.
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

#include "gloo/InterruptibleWait.hpp"
#include "host/NcclError.hpp"

namespace torchcomms_pg::gloo {

// Keeps the group's first failure. Its ranks are numbered in the group. A connection that breaks or
// cannot be made does not prove that the rank at its other end is at fault. Thread-safe.
class GroupFailure : public std::enable_shared_from_this<GroupFailure> {
 public:
  // `rank`: this process's rank. `died` returns how a rank's process has ended, with its name, or ""
  // if it may still run.
  GroupFailure(
      c10::intrusive_ptr<c10d::Store> store, int rank, std::function<std::string(int rank)> died)
      : store_(std::move(store)), rank_(rank), died_(std::move(died)) {}

  std::optional<host::NcclError> known() const;
  // Throws the failure, if there is one.
  void check() const;

  // Sets the failure. Callable from any thread; does not block.
  void fail(const host::NcclError& failure);

  // Fails the group if the handler of a signal, which runs in the calling thread, raises.
  void lookForSignals();
  void failInterrupted();
  // Fails the group because this rank, called `name` in errors, cannot start a thread to connect.
  void failWithoutThread(const std::string& name, const std::system_error& error);

  // Same as `changed`.wait(), but also returns after a failure, and checks for signals meanwhile.
  template <class Done>
  void wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, Done done) {
    while (!changed.wait_for(lock, kSignalLook, [&] { return done() || known(); })) {
      lock.unlock();
      lookForSignals();
      lock.lock();
    }
  }

  // Raises the group's failure, which is `inside` unless the group has failed before. `inside`: a
  // failure among ranks of this host. `members`: their numbers in the group.
  [[noreturn]] void raiseFor(const host::NcclError& inside, const std::vector<int>& members);
  // Fails the group with `inside`.
  void adopt(const host::NcclError& inside, const std::vector<int>& members);

  // Fails the group with the failure that another rank has encoded. Returns false if `told` is
  // none.
  bool failAsTold(const std::string& told);
  // Does the same with what another rank has written under a key of the group's store.
  bool failAsWritten(c10d::Store& store, const std::string& key);
  // Does the same with the reason for which another rank has failed the group. Also returns false
  // if the store is gone.
  bool failAsOthers(c10d::Store& store);

  // What is known of ranks to which this one has lost the connection, or cannot connect.
  struct Lost {
    std::vector<int> silent;  // ranks that do not answer, although the store does
    bool store = true;        // false if the store is gone
  };
  // Waits until another rank's reason, or the death of one of `ranks`, has failed the group, and
  // returns nullopt. If that takes too long, returns what is known of `ranks`. `ask`: asks them
  // through the store whether they still run.
  std::optional<Lost> awaitReason(const std::vector<int>& ranks, bool ask);
  // Answers through the caller's connection if another rank has asked whether this one still runs.
  void answer(c10d::Store& group) const;

  // Sets a key of the group's store and announces it; blocks as awaitTold() does. If no thread can
  // be started for that, ranks that wait for the key do so until their deadline.
  void write(std::string key, std::string text);

  // Announce that this rank has written into the group's store, so that the ranks of all hosts look
  // soon, and count such announcements.
  static void announce(c10d::Store& group) { group.add(kNewsKey, 1); }
  static int64_t news(c10d::Store& group) {
    // adding to a missing key would make it
    return group.check({kNewsKey}) ? group.add(kNewsKey, 0) : 0;
  }

  // Actions at a failure, each of which may be empty. `release` runs in the failing thread. `tell`,
  // which may block for a moment, runs in another thread, followed by `told` when the other ranks
  // can read the reason. `learn` runs repeatedly in a thread that waits for the reason: it fails
  // the group with a reason that the owner knows, and `first` makes it ask other ranks to look as
  // well.
  struct Actions {
    std::function<void()> release = {};
    std::function<void()> tell = {};
    std::function<void()> told = {};
    std::function<void(bool first)> learn = {};
  };
  // Adds actions for the life of `owner`. They are not called for an earlier failure.
  void watch(const std::shared_ptr<void>& owner, Actions actions);

  // Waits after a failure until the other ranks can read the reason, for at most 5 s, which all
  // groups of the process share. Otherwise they would see only broken connections.
  void awaitTold();

 private:
  static constexpr const char* kNewsKey = "news";

  struct Watcher {
    std::weak_ptr<void> owner;
    Actions actions;
  };

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
  bool told_ = false;  // the other ranks can read the reason, or writing it has failed
};

}  // namespace torchcomms_pg::gloo
