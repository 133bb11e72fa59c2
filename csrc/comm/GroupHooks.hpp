// Hooks of a communicator's c10d group. Users' hooks are in Hooks.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "base/AtomicShared.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Work;

// Holds one hook of each kind; a new hook replaces the old one. Thread-safe.
class GroupHooks {
 public:
  // Hook that is called when an operation has finished, in any thread. `work` is null for a
  // synchronous operation, and if the caller has dropped the Work.
  using End = std::function<void(
      const Operation& op, Work* work, Clock::time_point started, Clock::time_point finished)>;
  // Hook that is called once, when the communicator fails, in a separate thread.
  using Failed = std::function<void()>;

  void setEnd(End hook) { end_.store(shared(std::move(hook))); }
  void setFailed(Failed hook) { failed_.store(shared(std::move(hook))); }

  // Return the hooks, or null.
  std::shared_ptr<const End> end() const { return end_.load(); }
  std::shared_ptr<const Failed> failed() const { return failed_.load(); }

 private:
  template <class Hook>
  static std::shared_ptr<const Hook> shared(Hook hook) {
    return hook ? std::make_shared<const Hook>(std::move(hook)) : nullptr;
  }

  AtomicShared<const End> end_;
  AtomicShared<const Failed> failed_;
};

}  // namespace torchcomms_pg
