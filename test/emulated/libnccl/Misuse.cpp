#include "libnccl/Misuse.hpp"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <vector>

namespace emulated {

namespace {

std::mutex misusesMutex;
std::vector<std::string> misuses;
std::mutex errorMutex;
std::array<char, 1024> lastError{};

}  // namespace

void misuse(const std::string& function, const std::string& what) {
  std::array<char, 16> thread{};
  pthread_getname_np(pthread_self(), thread.data(), thread.size());
  const auto line = function + ": " + what;
  std::fprintf(stderr, "emulated NCCL: %s: %s\n", thread.data(), line.c_str());
  const std::lock_guard lock(misusesMutex);
  misuses.push_back(line);
}

void setError(const std::string& text) {
  const std::lock_guard lock(errorMutex);
  std::snprintf(lastError.data(), lastError.size(), "%s", text.c_str());
}

const char* lastErrorText() {
  return lastError.data();
}

}  // namespace emulated

// Returns all since the last call, a line each.
extern "C" __attribute__((visibility("default"))) const char* emulatedMisuses() {
  using namespace emulated;
  thread_local std::string all;
  all.clear();
  const std::lock_guard lock(misusesMutex);
  for (const auto& line : misuses) all += line + "\n";
  misuses.clear();
  return all.c_str();
}
