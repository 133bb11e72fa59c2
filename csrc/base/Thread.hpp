// The threads of the extension, which are all started here.
#pragma once

#include <pthread.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace torchcomms_pg {

// Throws the error for a thread that cannot be started.
[[noreturn]] inline void raiseNoThread(const std::string& what, const char* why) {
  throw std::runtime_error(
      what + ": no thread can be started (" + why +
      "); see the limits of the user, ulimit -u, and of the container, pids.max");
}

// Starts a thread that runs `body`, for an owner that joins it. `name` has at most 15
// characters and lives as long as `body`. Throws std::system_error, after `body` is destroyed, if
// no thread can be started.
template <class Body>
std::thread startThread(const char* name, Body body) {
  return std::thread([name, body = std::move(body)]() mutable {
    pthread_setname_np(pthread_self(), name);
    body();
  });
}

// Does the same with a detached thread, whose `body` owns what it uses.
template <class Body>
void startDetached(const char* name, Body body) {
  startThread(name, std::move(body)).detach();
}

// Does the same, but throws raiseNoThread()'s error, which says that `what` needs a thread.
template <class Body>
void startDetached(const char* name, const std::string& what, Body body) {
  try {
    startDetached(name, std::move(body));
  } catch (const std::system_error& error) {
    raiseNoThread(what, error.what());
  }
}

}  // namespace torchcomms_pg
