#include "diagnosis/status/Gateway.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace torchcomms_pg::status {

namespace {

// The files to close, on kernels that cannot close all with one call: before Linux 5.9.
constexpr int kFirstFile = 3;
constexpr long kMostFiles = 1 << 16;

using Stack = std::array<char, 64 << 10>;

// What the new processes share with the calling thread, which waits until the program runs.
struct Plan {
  std::vector<char*> words;
  std::vector<char*> environment;
  int mostFiles = 0;
  int error = 0;
  sigset_t noSignals{};
  alignas(16) Stack outer{};
  alignas(16) Stack inner{};
};

// Starts a process in this process's memory. Returns its pid when it has ended, or runs a program.
// Its end sends no signal, unless it runs a program.
int start(int (*body)(void*), Stack& stack, Plan& plan) {
  return clone(body, stack.data() + stack.size(), CLONE_VM | CLONE_VFORK, &plan);
}

// The following two run in the new processes, and call nothing that takes a lock.

int runProgram(void* given) {
  auto& plan = *static_cast<Plan*>(given);
#ifdef SYS_close_range
  const bool closed = syscall(SYS_close_range, kFirstFile, ~0U, 0) == 0;
#else
  const bool closed = false;
#endif
  for (int file = kFirstFile; !closed && file < plan.mostFiles; ++file) {
    close(file);
  }
  sigprocmask(SIG_SETMASK, &plan.noSignals, nullptr);
  execve(plan.words.front(), plan.words.data(), plan.environment.data());
  plan.error = errno;
  _exit(1);
}

int leaveSession(void* given) {
  auto& plan = *static_cast<Plan*>(given);
  setsid();
  const int nowhere = open("/dev/null", O_RDWR);
  dup2(nowhere, STDIN_FILENO);
  dup2(nowhere, STDOUT_FILENO);
  if (start(runProgram, plan.inner, plan) < 0) {
    plan.error = errno;
  }
  _exit(0);
}

std::vector<char*> pointersTo(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) {
    pointers.push_back(text.data());
  }
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

void runApart(std::vector<std::string> words, std::vector<std::string> environment) {
  const auto plan = std::make_unique<Plan>();
  plan->words = pointersTo(words);
  plan->environment = pointersTo(environment);
  plan->mostFiles = static_cast<int>(std::min(sysconf(_SC_OPEN_MAX), kMostFiles));
  sigemptyset(&plan->noSignals);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // handlers must not run in the new processes
  const auto outer = start(leaveSession, plan->outer, *plan);
  const int error = outer < 0 ? errno : 0;
  if (outer > 0) {
    waitpid(outer, nullptr, __WALL);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0 || plan->error != 0) {
    throw std::runtime_error(
        "cannot run " + words.front() + ": " + std::strerror(error != 0 ? error : plan->error));
  }
}

}  // namespace torchcomms_pg::status
