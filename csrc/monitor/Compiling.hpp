// Whether this process compiles: it is late then, not lost. Knows nothing of
// torch, whose callbacks tell.
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

  // Begins may nest. `trigger`: what for, e.g. "LAZY_BACKWARD".
  static void begin(const std::string& trigger);
  static void end();

  struct State {
    std::optional<Milliseconds> since;  // the begin; none: it does not compile
    std::optional<Milliseconds> ended;  // since the last end; none: it never has
  };
  static State state(Clock::time_point now);

  // How much longer than its deadline an operation waits for ranks that compile.
  static void setLimit(Milliseconds limit);
  static Milliseconds limit();

  struct Interval {
    std::string trigger;
    int64_t begin = 0;  // nanoseconds of the system's clock
    int64_t end = 0;    // 0: not yet
  };
  // The latest, for the flight recorder.
  static std::vector<Interval> intervals();
};

}  // namespace torchcomms_pg
