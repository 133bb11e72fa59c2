#include "libcudart/Calls.hpp"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace emulated {

namespace {

enum class Trace { none, errors, calls };

Trace wantedTrace() {
  const char* const text = std::getenv("EMULATED_TRACE");
  const std::string wanted = text == nullptr ? "" : text;
  if (wanted == "calls") return Trace::calls;
  if (wanted == "errors") return Trace::errors;
  if (!wanted.empty()) {
    std::fprintf(stderr, "emulated: EMULATED_TRACE=%s: wanted calls or errors\n", wanted.c_str());
  }
  return Trace::none;
}

Trace trace() {
  static const Trace wanted = wantedTrace();
  return wanted;
}

thread_local cudaError_t lastError = cudaSuccess;

// Counts by thread and function. Never destroyed: threads call until the process is gone.
struct Counts {
  std::atomic<bool> counting{false};
  std::mutex mutex;
  std::map<std::string, std::map<std::string, uint64_t>> byThread;
};

Counts& counts() {
  static auto* const instance = new Counts;
  return *instance;
}

// The lock of a context, which the driver takes in most calls and keeps in those that wait for the
// device: pytorch/pytorch#110449 and ProcessGroupNCCL's watchdog tell of queries that hang behind
// it. Here a test holds it.
struct Driver {
  std::atomic<bool> held{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::thread::id holder;
  std::multiset<std::pair<std::string, std::string>> waiting;  // thread, function
};

Driver& driver() {
  static auto* const instance = new Driver;
  return *instance;
}

void awaitDriver(const char* function) {
  auto& self = driver();
  if (!self.held.load(std::memory_order_acquire)) return;
  std::unique_lock lock(self.mutex);
  if (self.holder == std::this_thread::get_id()) return;
  const auto entry = self.waiting.emplace(threadName(), function);
  self.changed.wait(lock, [&] { return !self.held.load(); });
  self.waiting.erase(entry);
}

std::atomic<bool> exiting{false};

// Destroyed after what was loaded later, torch's libraries among it.
const struct AtExit {
  ~AtExit() { exiting.store(true); }
} atExit;

// Keeps what a test reads until the same thread asks again.
const char* answer(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

std::string threadName() {
  if (gettid() == getpid()) return "main";
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return name.data();
}

std::string quoted(const std::string& text) {
  std::string all = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') all += '\\';
    all += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return all + '"';
}

void called(const char* function) {
  if (trace() == Trace::calls) {
    std::fprintf(stderr, "emulated: %s: %s\n", threadName().c_str(), function);
  }
  auto& all = counts();
  if (!all.counting.load(std::memory_order_relaxed)) return;
  const auto thread = threadName();
  const std::lock_guard lock(all.mutex);
  ++all.byThread[thread][function];
}

void calledDriver(const char* function) {
  called(function);
  awaitDriver(function);
}

cudaError_t failed(cudaError_t error, const std::string& why) {
  lastError = error;
  // A query's cudaErrorNotReady is an answer.
  if (trace() != Trace::none && error != cudaErrorNotReady) {
    std::fprintf(
        stderr, "emulated: %s: %s: %s\n", threadName().c_str(), cudaGetErrorName(error),
        why.c_str());
  }
  return error;
}

bool unloading() {
  return exiting.load(std::memory_order_relaxed);
}

}  // namespace emulated

using namespace emulated;

// ---------------------------------------------------------------- for tests

// Counts from zero, or no longer.
EMULATED_API void emulatedCountCalls(int on) {
  auto& all = counts();
  const std::lock_guard lock(all.mutex);
  all.byThread.clear();
  all.counting.store(on != 0);
}

// JSON: {thread: {function: calls}}.
EMULATED_API const char* emulatedCounts() {
  auto& all = counts();
  const std::lock_guard lock(all.mutex);
  std::string text;
  for (const auto& [thread, functions] : all.byThread) {
    std::string inner;
    for (const auto& [function, number] : functions) {
      inner += (inner.empty() ? "" : ", ") + quoted(function) + ": " + std::to_string(number);
    }
    text += (text.empty() ? "" : ", ") + quoted(thread) + ": {" + inner + "}";
  }
  return answer("{" + text + "}");
}

// The calling thread alone gets through to the driver, until it releases it.
EMULATED_API void emulatedHoldDriver() {
  auto& self = driver();
  std::unique_lock lock(self.mutex);
  self.changed.wait(lock, [&] { return !self.held.load(); });
  self.holder = std::this_thread::get_id();
  self.held.store(true, std::memory_order_release);
}

EMULATED_API void emulatedReleaseDriver() {
  auto& self = driver();
  const std::lock_guard lock(self.mutex);
  self.held.store(false);
  self.changed.notify_all();
}

// JSON: [[thread, function]] of those that wait for the driver.
EMULATED_API const char* emulatedDriverWaiters() {
  auto& self = driver();
  const std::lock_guard lock(self.mutex);
  std::string text;
  for (const auto& [thread, function] : self.waiting) {
    text += (text.empty() ? "[" : ", [") + quoted(thread) + ", " + quoted(function) + "]";
  }
  return answer("[" + text + "]");
}

// Called by what stubs.py makes of functions that torch wants and nobody here defines: says so, and
// returns `error`.
EMULATED_API int emulatedLacks(const char* function, int error) {
  called(function);
  std::fprintf(
      stderr, "emulated: %s was called, which is not emulated (test/emulated/README.md)\n",
      function);
  if (std::string(function).find("cuda") != std::string::npos) {
    failed(static_cast<cudaError_t>(error), function);
  }
  return error;
}

// ---------------------------------------------------------------- Runtime API, "Error Handling"

EMULATED_API cudaError_t cudaGetLastError() {
  called(__func__);
  return std::exchange(lastError, cudaSuccess);
}

EMULATED_API cudaError_t cudaPeekAtLastError() {
  called(__func__);
  return lastError;
}

EMULATED_API const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define EMULATED_NAME(name) \
  case name: return #name;
    EMULATED_NAME(cudaSuccess)
    EMULATED_NAME(cudaErrorCapturedEvent)
    EMULATED_NAME(cudaErrorCudartUnloading)
    EMULATED_NAME(cudaErrorIllegalState)
    EMULATED_NAME(cudaErrorInvalidDevice)
    EMULATED_NAME(cudaErrorInvalidResourceHandle)
    EMULATED_NAME(cudaErrorInvalidValue)
    EMULATED_NAME(cudaErrorLaunchFailure)
    EMULATED_NAME(cudaErrorMemoryAllocation)
    EMULATED_NAME(cudaErrorNotReady)
    EMULATED_NAME(cudaErrorNotSupported)
    EMULATED_NAME(cudaErrorPeerAccessAlreadyEnabled)
    EMULATED_NAME(cudaErrorStreamCaptureImplicit)
    EMULATED_NAME(cudaErrorStreamCaptureInvalidated)
    EMULATED_NAME(cudaErrorStreamCaptureIsolation)
    EMULATED_NAME(cudaErrorStreamCaptureMerge)
    EMULATED_NAME(cudaErrorStreamCaptureUnjoined)
    EMULATED_NAME(cudaErrorStreamCaptureUnmatched)
    EMULATED_NAME(cudaErrorStreamCaptureUnsupported)
    EMULATED_NAME(cudaErrorStreamCaptureWrongThread)
#undef EMULATED_NAME
    default: return "an error that the emulator does not use";
  }
}

EMULATED_API const char* cudaGetErrorString(cudaError_t error) {
  return cudaGetErrorName(error);
}
