// Records when this process compiles, since a rank that compiles is late, but not stuck.
// Independent of torch, whose callbacks report compilations.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchcomms_pg {

// Thread-safe.
class Compiling {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  // Begin and end a compilation. Calls may nest. `trigger`: the cause, e.g. "LAZY_BACKWARD".
  static void begin(const std::string& trigger);
  static void end();

  struct State {
    std::optional<Milliseconds> since;  // time since the start; nullopt unless it compiles
    std::optional<Milliseconds> ended;  // time since the latest end; nullopt before the first
  };
  static State state(Clock::time_point now);

  // Set and return how long an operation waits beyond its deadline for ranks that compile.
  static void setLimit(Milliseconds limit);
  static Milliseconds limit();

  struct Interval {
    std::string trigger;
    int64_t begin = 0;  // nanoseconds of the system's clock
    int64_t end = 0;    // 0 while the compilation goes on
  };
  // Returns the latest 256 compilations, for the flight recorder.
  static std::vector<Interval> intervals();
};

}  // namespace torchcomms_pg
