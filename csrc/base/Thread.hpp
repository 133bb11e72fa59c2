// Functions that start threads. The extension starts all its threads with them.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace torchcomms_pg {

// Returns the calling thread's number, which Python's threading.get_ident() also returns; not 0.
inline uint64_t threadNumber() {
  return static_cast<uint64_t>(pthread_self());
}

// Throws an error that says that no thread can be started for `what`, and why.
[[noreturn]] inline void raiseNoThread(const std::string& what, const char* why) {
  throw std::runtime_error(
      what + ": no thread can be started (" + why +
      "); see the limits of the user, ulimit -u, and of the container, pids.max");
}

// Calls `body`, a thread's or a step of it. An exception, such as one for lack of memory, ends
// `body`, but not the process. So what another thread waits for without a limit has to follow in a
// later step. Other exceptions than std::exception pass: they are how threads are cancelled.
template <class Body>
void attempt(Body&& body) {
  try {
    body();
  } catch (const std::exception&) {
  }
}

// Starts and returns a thread that attempts `body`; the caller joins it. `name` has at most 15
// characters and must live as long as `body`. If no thread can be started, destroys `body` and
// throws std::system_error.
template <class Body>
std::thread startThread(const char* name, Body body) {
  return std::thread([name, body = std::move(body)]() mutable {
    pthread_setname_np(pthread_self(), name);
    attempt(body);
  });
}

// Starts a detached thread that attempts `body`, which must own what it uses. Throws as
// startThread().
template <class Body>
void startDetached(const char* name, Body body) {
  startThread(name, std::move(body)).detach();
}

// Does the same, but throws the error of raiseNoThread(), which begins with `what`.
template <class Body>
void startDetached(const char* name, const std::string& what, Body body) {
  try {
    startDetached(name, std::move(body));
  } catch (const std::system_error& error) {
    raiseNoThread(what, error.what());
  }
}

}  // namespace torchcomms_pg
