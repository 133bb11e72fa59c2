// The reduction operators that callers have created for one communicator.
#pragma once

#include <nccl.h>

#include <map>

#include "base/Mutex.hpp"
#include "shm/Host.hpp"

namespace torchcomms_pg::shm {

// Thread-safe. destroy() and resolve() throw NcclError if they do not know the operator.
class Operators {
 public:
  // Does what ncclRedOpCreatePreMulSum does. The caller has checked the arguments.
  ncclRedOp_t createPreMulSum(
      const void* scalar, ncclDataType_t type, ncclScalarResidence_t residence);
  void destroy(ncclRedOp_t op);
  // Returns the operator for which `op` stands, one of NCCL's or a created one. Throws NcclError
  // also if `op` was created for a different type than `type`.
  Operator resolve(ncclRedOp_t op, ncclDataType_t type) const;

 private:
  struct Created {
    ncclDataType_t type;
    Operator op;
  };

  mutable Mutex mutex_;
  std::map<int, Created> created_ GUARDED_BY(mutex_);
  int next_ GUARDED_BY(mutex_) = ncclNumOps;
};

}  // namespace torchcomms_pg::shm
