// What happened on the wire, as opposed to a caller's mistake (ValueError,
// TypeError, RuntimeError). Becomes torchcomms_pg.CommError in Python.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/TorchCompat.hpp"

namespace torchcomms_pg {

// All that is known of a failure. `message` is complete by itself.
struct Failure {
  c10d::ErrorType type = c10d::ErrorType::COMM_ERROR;
  std::string message;
  std::string op;            // e.g. "all_reduce"; empty when no operation was involved
  uint64_t seq = 0;          // of that operation
  std::string group;         // the group's name
  std::vector<int> ranks{};  // group ranks that did not arrive, died or aborted, where known
  std::string verdict{};     // what the ranks found out together; empty: nobody asked
  bool endsProcess = false;  // at the next call, of one that was met on other ranks

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
