// The reduction operators that callers have created for one communicator.
#pragma once

#include <nccl.h>

#include <map>
#include <mutex>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {

// Thread-safe. All throw NcclError.
class Operators {
 public:
  // Same as ncclRedOpCreatePreMulSum, with arguments that have been checked.
  ncclRedOp_t createPreMulSum(
      const void* scalar, ncclDataType_t type, ncclScalarResidence_t residence);
  void destroy(ncclRedOp_t op);
  // Returns the operator that `op` stands for, which may be one of NCCL's own.
  Operator resolve(ncclRedOp_t op, ncclDataType_t type) const;

 private:
  struct Created {
    ncclDataType_t type;
    Operator op;
  };

  mutable std::mutex mutex_;
  std::map<int, Created> created_;
  int next_ = ncclNumOps;
};

}  // namespace torchcomms_pg::shm
