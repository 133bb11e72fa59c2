// The exception of the library, which becomes NCCL's result code and "last error" text at the C
// boundary.
#pragma once

#include <nccl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torchcomms_pg::host {

class NcclError : public std::runtime_error {
 public:
  // `ranks`: those at fault, where they are known: they died, left, aborted or did not come.
  NcclError(ncclResult_t result, const std::string& text, std::vector<int> ranks = {})
      : std::runtime_error(text), result(result), ranks(std::move(ranks)) {}
  const ncclResult_t result;
  const std::vector<int> ranks;
};

}  // namespace torchcomms_pg::host
