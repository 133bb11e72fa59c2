// Failures of communication, as opposed to a caller's mistakes (ValueError, TypeError,
// RuntimeError). CommError becomes torchcomms_pg.CommError in Python.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/TorchCompat.hpp"

namespace torchcomms_pg {

// A failure and all that is known of it. `message` can be understood without the other fields.
struct Failure {
  c10d::ErrorType type = c10d::ErrorType::COMM_ERROR;
  std::string message{};
  std::string op{};          // e.g. "all_reduce"; empty if no operation was involved
  uint64_t seq = 0;          // the operation's sequence number, or 0
  std::string group{};       // the group's name
  std::vector<int> ranks{};  // group ranks that did not arrive, died or aborted, if known
  std::string verdict{};     // the verdict's text; empty if there was no diagnosis
  std::string parting{};     // where the ranks took different ways, see Verdict; or empty
  bool endsProcess = false;  // after a failure of other ranks: the next call ends the process

  std::string text() const { return verdict.empty() ? message : message + "\n" + verdict; }
};

class CommError : public c10::DistBackendError {
 public:
  explicit CommError(Failure failure)
      : c10::DistBackendError(
            c10::SourceLocation{__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
            failure.text()),
        failure_(std::move(failure)) {}

  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

}  // namespace torchcomms_pg
