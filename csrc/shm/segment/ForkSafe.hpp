// State that every process has once; a forked child gets a copy that it can use.
#pragma once

#include <pthread.h>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"

namespace torchcomms_pg::shm {

// Returns this process's State, which is never destroyed, since threads may use it while the
// process exits. A fork waits for State::mutex. In the child, the fork first calls
// State::inChild(), if State has this function.
template <class State>
State& forkSafe() {
  static State& instance = []() -> State& {
    static auto& made = neverDestroyed<State>();
    pthread_atfork(
        []() ACQUIRE(made.mutex) { made.mutex.lock(); },
        []() RELEASE(made.mutex) { made.mutex.unlock(); },
        []() RELEASE(made.mutex) {
          if constexpr (requires { made.inChild(); }) made.inChild();
          made.mutex.unlock();
        });
    return made;
  }();
  return instance;
}

}  // namespace torchcomms_pg::shm
