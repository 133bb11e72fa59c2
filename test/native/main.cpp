// Runs the tests whose names contain the argument, each in its own process, as many at a time as
// there are cores. Shows what a test has printed once it has ended.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <list>
#include <thread>

#include "Check.hpp"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSlower = test::kSlow ? 10 : 1;

// A test in its process, whose output goes into a file without a name.
class Running {
 public:
  explicit Running(const test::Test& test)
      : test_(test), output_(std::tmpfile()), begun_(Clock::now()) {
    CHECK(output_ != nullptr);
    child_ = fork();
    CHECK(child_ >= 0);
    if (child_ != 0) return;
    setpgid(0, 0);
    dup2(fileno(output_), STDOUT_FILENO);
    dup2(fileno(output_), STDERR_FILENO);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what it prints is not lost with a failed check
    test.body();
    std::exit(0);
  }

  ~Running() { std::fclose(output_); }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  // Returns whether the test has ended; ends one that has taken too long.
  bool ended() {
    if (waitpid(child_, &status_, WNOHANG) == 0) {
      if (Clock::now() < begun_ + std::chrono::seconds(test_.seconds * kSlower)) return false;
      late_ = true;
      kill(-child_, SIGKILL);
      waitpid(child_, &status_, 0);
    }
    kill(-child_, SIGKILL);  // processes that it left behind
    return true;
  }

  // Prints what the test has printed, and its result; returns whether it has passed.
  bool report() const {
    std::rewind(output_);
    char text[4096];
    while (const size_t size = std::fread(text, 1, sizeof(text), output_)) {
      std::fwrite(text, 1, size, stdout);
    }
    if (late_) std::printf("no end after %d seconds\n", test_.seconds * kSlower);
    if (!late_ && WIFSIGNALED(status_)) std::printf("%s\n", strsignal(WTERMSIG(status_)));
    const bool passed = !late_ && WIFEXITED(status_) && WEXITSTATUS(status_) == 0;
    const std::chrono::duration<double> took = Clock::now() - begun_;
    std::printf("%-60s%s %.1f s\n", test_.name, passed ? "ok    " : "FAILED", took.count());
    std::fflush(stdout);
    return passed;
  }

 private:
  const test::Test& test_;
  std::FILE* const output_;
  const Clock::time_point begun_;
  pid_t child_ = 0;
  int status_ = 0;
  bool late_ = false;
};

}  // namespace

int main(int count, char** arguments) {
  const char* filter = count > 1 ? arguments[1] : "";
  const size_t atATime = std::max(1u, std::thread::hardware_concurrency());
  int failed = 0, run = 0;
  std::list<Running> running;
  const auto await = [&](size_t left) {
    while (running.size() > left) {
      running.remove_if([&](Running& each) {
        if (!each.ended()) return false;
        failed += !each.report();
        return true;
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  for (const test::Test& test : test::tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    await(atATime - 1);
    running.emplace_back(test);
    ++run;
  }
  await(0);
  std::printf("%d tests, %d failed\n", run, failed);
  return failed != 0 || run == 0;
}
