// Tells whether this process compiles: then it is late, not lost. Knows nothing of torch, whose
// callbacks report it.
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
    std::optional<Milliseconds> since;  // time since the start; none: it does not compile
    std::optional<Milliseconds> ended;  // time since the last end; none: it never ended one
  };
  static State state(Clock::time_point now);

  // Limit of the time beyond its deadline that an operation waits for ranks that compile.
  static void setLimit(Milliseconds limit);
  static Milliseconds limit();

  struct Interval {
    std::string trigger;
    int64_t begin = 0;  // nanoseconds of the system's clock
    int64_t end = 0;    // 0: not yet
  };
  // Returns the latest compilations, for the flight recorder.
  static std::vector<Interval> intervals();
};

}  // namespace torchcomms_pg
