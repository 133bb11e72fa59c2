// Objects that exist once per process: a forked child has its own.
#pragma once

#include <unistd.h>

#include <atomic>

namespace torchcomms_pg {

// Holds a T, which a forked child creates anew at its first use. The parent's object may be locked
// by a thread that does not exist in the child, and may describe threads and objects of the parent.
// No T is ever destroyed, see neverDestroyed(). A PerProcess is static; T is default-constructible.
template <class T>
class PerProcess {
 public:
  T& get() {
    Instance* current = instance_.load(std::memory_order_acquire);
    while (current == nullptr || current->pid != getpid()) {
      auto* const fresh = new Instance();
      if (instance_.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) {
        return fresh->object;
      }
      delete fresh;
    }
    return current->object;
  }

 private:
  struct Instance {
    T object;
    const pid_t pid = getpid();
  };
  std::atomic<Instance*> instance_{nullptr};
};

}  // namespace torchcomms_pg
