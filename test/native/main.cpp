// Runs the tests whose names contain the argument, each in its own process.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include "Check.hpp"

namespace {

constexpr int kSlower = test::kSlow ? 10 : 1;

bool passes(const test::Test& test) {
  const pid_t child = fork();
  if (child == 0) {
    setpgid(0, 0);
    test.body();
    std::exit(0);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(test.seconds * kSlower);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      std::printf("no end after %d seconds\n", test.seconds * kSlower);
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  kill(-child, SIGKILL);  // processes that it left behind
  if (WIFSIGNALED(status)) std::printf("%s\n", strsignal(WTERMSIG(status)));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

int main(int count, char** arguments) {
  const char* filter = count > 1 ? arguments[1] : "";
  int failed = 0, run = 0;
  for (const test::Test& test : test::tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    const auto start = std::chrono::steady_clock::now();
    std::printf("%-60s", test.name);
    std::fflush(stdout);
    const bool passed = passes(test);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%s %.1f s\n", passed ? "ok    " : "FAILED", took.count());
    ++run;
    failed += !passed;
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return failed != 0 || run == 0;
}
