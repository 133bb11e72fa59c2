// Objects that are never destroyed.
#pragma once

#include <utility>

namespace torchcomms_pg {

// Makes a T that is never destroyed. Declare a singleton as `static auto& it =
// neverDestroyed<T>();`: threads and destructors of other static objects may use the singleton
// while the process exits.
template <class T, class... Args>
T& neverDestroyed(Args&&... args) {
  return *new T(std::forward<Args>(args)...);
}

}  // namespace torchcomms_pg
