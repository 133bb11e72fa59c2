// How threads of the extension are started.
#pragma once

#include <stdexcept>
#include <string>

namespace torchcomms_pg {

// What a failed start of a thread is told as.
[[noreturn]] inline void raiseNoThread(const std::string& what, const char* why) {
  throw std::runtime_error(
      what + ": no thread can be started (" + why +
      "); see the limits of the user, ulimit -u, and of the container, pids.max");
}

}  // namespace torchcomms_pg
