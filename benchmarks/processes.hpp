// Processes that share memory, and the times they leave there.
#pragma once

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace bench {

[[noreturn]] inline void stop(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Memory that children share; zero, and touched.
template <class T>
T* shared(size_t count) {
  void* memory = mmap(
      nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE,
      -1, 0);
  if (memory == MAP_FAILED) stop("mmap failed");
  return static_cast<T*>(memory);
}

// body(rank) in one process per rank. Ends all of them when one fails.
inline void processes(int ranks, const std::function<void(int)>& body) {
  std::fflush(nullptr);  // or every child prints it too
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) stop("fork failed");
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      body(rank);
      std::fflush(nullptr);
      _exit(0);
    }
    children.push_back(child);
  }
  bool failed = false;
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    wait(&status);
    if (status == 0 || failed) continue;
    failed = true;
    for (const pid_t child : children) kill(child, SIGKILL);
  }
  if (failed) stop("a process failed");
}

// All of `ranks` processes meet; on few cores without taking them from each other.
class Meeting {
 public:
  void meet(int ranks) {
    const int round = round_.load();
    if (arrived_.fetch_add(1) + 1 == ranks) {
      arrived_.store(0);
      round_.store(round + 1);
    }
    for (int spins = 0; round_.load() == round; ++spins) {
      if (spins > 100) sched_yield();
    }
  }

 private:
  std::atomic<int> arrived_;
  std::atomic<int> round_;
};

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(values.size() * share))];
}

}  // namespace bench
