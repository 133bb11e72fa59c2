// Objects that are never destroyed.
#pragma once

#include <utility>

namespace torchcomms_pg {

// Makes a T that is never destroyed. An object of which a process has one is `static auto& it =
// leaked<T>();`: threads, and destructors of other static objects, may use it while the process
// ends.
template <class T, class... Args>
T& leaked(Args&&... args) {
  return *new T(std::forward<Args>(args)...);
}

}  // namespace torchcomms_pg
