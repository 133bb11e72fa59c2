// Whether this process compiles, and so is late and not lost. Independent of torch, whose callbacks
// report compilations.
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

  // Begin and end a compilation; begins may nest. `trigger`: its cause, e.g. "LAZY_BACKWARD".
  static void begin(const std::string& trigger);
  static void end();

  struct State {
    std::optional<Milliseconds> since;  // time since the start; nullopt if it does not compile
    std::optional<Milliseconds> ended;  // time since the last end; nullopt if it has not compiled
  };
  static State state(Clock::time_point now);

  // Limit of the time that an operation waits for ranks that compile, beyond its deadline.
  static void setLimit(Milliseconds limit);
  static Milliseconds limit();

  struct Interval {
    std::string trigger;
    int64_t begin = 0;  // nanoseconds of the system's clock
    int64_t end = 0;    // 0 if it goes on
  };
  // Returns the latest compilations, for the flight recorder.
  static std::vector<Interval> intervals();
};

}  // namespace torchcomms_pg
