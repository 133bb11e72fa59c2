// Objects that are never destroyed.
#pragma once

#include <utility>

namespace torchcomms_pg {

// A new T. What a process has one of is `static auto& it = leaked<T>();`: threads, and destructors
// of other static objects, may use it while the process ends.
template <class T, class... Args>
T& leaked(Args&&... args) {
  return *new T(std::forward<Args>(args)...);
}

}  // namespace torchcomms_pg
