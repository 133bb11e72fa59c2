// A stderr that nobody reads.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <utility>

#include "Check.hpp"

namespace test {

// While it lives, stderr is a pipe that is full.
class FullPipe {
 public:
  FullPipe() {
    signal(SIGPIPE, SIG_IGN);  // as Python does: a line may wait when the reader goes
    std::array<int, 2> ends{};
    CHECK(pipe(ends.data()) == 0);
    reader_ = ends[0];
    const int flags = fcntl(ends[1], F_GETFL);
    CHECK(fcntl(ends[1], F_SETFL, flags | O_NONBLOCK) == 0);
    for (const size_t size : {size_t{4096}, size_t{1}}) {
      const std::string filling(size, 'x');
      while (write(ends[1], filling.data(), size) > 0) filled_ += size;
    }
    CHECK(fcntl(ends[1], F_SETFL, flags) == 0);
    before_ = dup(STDERR_FILENO);
    CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
    close(ends[1]);
  }
  ~FullPipe() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(reader_);
  }
  FullPipe(const FullPipe&) = delete;
  FullPipe& operator=(const FullPipe&) = delete;

  // Reads what was written behind the filling, until `part` has come.
  std::string readUntil(const std::string& part) {
    std::string text;
    while (text.size() < filled_ || text.find(part, filled_) == std::string::npos) {
      std::array<char, 4096> more{};
      const auto got = read(reader_, more.data(), more.size());
      CHECK(got > 0);
      text.append(more.data(), static_cast<size_t>(got));
    }
    return text.substr(std::exchange(filled_, 0));
  }

 private:
  int reader_ = -1;
  int before_ = -1;
  size_t filled_ = 0;
};

}  // namespace test
