// All hooks of a communicator: the users' hooks, and its c10d group's hooks.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "base/AtomicShared.hpp"
#include "comm/Work.hpp"
#include "hooks/Hooks.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

// Holds users' hooks, and for the c10d group one hook of each kind; a new one replaces the old one.
// Thread-safe.
class GroupHooks {
 public:
  // Hook that is called when an operation has finished, in any thread. `work` is null for a
  // synchronous operation, and if the caller has dropped the Work.
  using End = std::function<void(
      const Operation& op, Work* work, Clock::time_point started, Clock::time_point finished)>;
  // Hook that is called once, when the communicator fails, in a separate thread.
  using Failed = std::function<void()>;

  // Either may be null.
  void set(End end, Failed failed) {
    end_.store(shared(std::move(end)));
    failed_.store(shared(std::move(failed)));
  }

  // Return the hooks, or null.
  std::shared_ptr<const End> end() const { return end_.load(); }
  std::shared_ptr<const Failed> failed() const { return failed_.load(); }

  // Returns users' hooks on every operation, which the communicator's end clears. The object is
  // shared, so that a hook can be removed after that end.
  const std::shared_ptr<Hooks>& users() const { return users_; }
  // Takes over the users' hooks of `former`. A caller's handle then removes a hook from the object
  // that the hook was added to.
  void inherit(const GroupHooks& former) { users_ = former.users_; }

  // Calls the hooks for the end of an operation.
  void tellEnd(
      const Operation& op, const WorkPtr& work, const std::exception_ptr& error,
      Clock::time_point started, Clock::time_point finished) {
    if (const auto hook = end()) {
      // Hides the Work of a synchronous operation, which only measures the duration.
      (*hook)(op, op.async ? work.get() : nullptr, started, finished);
    }
    users_->tellEnd(op, work.get(), error, started, finished);
  }

 private:
  template <class Hook>
  static std::shared_ptr<const Hook> shared(Hook hook) {
    return hook ? std::make_shared<const Hook>(std::move(hook)) : nullptr;
  }

  std::shared_ptr<Hooks> users_ = std::make_shared<Hooks>();
  AtomicShared<const End> end_;
  AtomicShared<const Failed> failed_;
};

}  // namespace torchcomms_pg
