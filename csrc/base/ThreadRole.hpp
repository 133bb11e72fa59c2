// What one thread alone may do: clang's analysis checks it as it checks mutexes (base/Mutex.hpp).
#pragma once

#include <cassert>

#include "base/Mutex.hpp"

namespace torchcomms_pg {

// A thread's role, which other threads do not have. What is GUARDED_BY the role is used in
// functions that say REQUIRES of the role.
class CAPABILITY("role") ThreadRole {
 public:
  // Gives the role to the calling thread, which has no other one, while it lives.
  class [[nodiscard]] SCOPED_CAPABILITY Taken {
   public:
    explicit Taken(const ThreadRole& role) ACQUIRE(role) { current_ = &role; }
    ~Taken() RELEASE() { current_ = nullptr; }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
  };

  // Returns whether the calling thread has the role.
  bool isMine() const { return current_ == this; }

  // Tells the analysis, in a lambda, that the calling thread has the role. Builds with assertions,
  // such as the native tests, end the process if that is wrong.
  void check() const ASSERT_CAPABILITY(this) { assert(isMine()); }

 private:
  static inline thread_local const ThreadRole* current_ = nullptr;
};

}  // namespace torchcomms_pg
