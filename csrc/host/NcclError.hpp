// The exception of the library. At the C boundary it becomes NCCL's result code and "last error"
// text.
#pragma once

#include <nccl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torchcomms_pg::host {

class NcclError : public std::runtime_error {
 public:
  // `ranks` are the ranks at fault, if known: they died, left, aborted or did not arrive.
  NcclError(ncclResult_t result, const std::string& text, std::vector<int> ranks = {})
      : std::runtime_error(text), result(result), ranks(std::move(ranks)) {}
  const ncclResult_t result;
  const std::vector<int> ranks;
};

}  // namespace torchcomms_pg::host
