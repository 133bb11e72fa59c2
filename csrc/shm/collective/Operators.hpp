// The reduction operators that callers have created for one communicator.
#pragma once

#include <nccl.h>

#include <map>
#include <string>

#include "base/Mutex.hpp"
#include "shm/Host.hpp"

namespace torchcomms_pg::shm {

// Thread-safe. destroy() and resolve() throw NcclError if they do not know the operator.
class Operators {
 public:
  // Does what ncclRedOpCreatePreMulSum does. The caller has checked the arguments.
  ncclRedOp_t createPreMulSum(
      const void* scalar, ncclDataType_t type, ncclScalarResidence_t residence) {
    Operator op{.reduction = ncclSum, .scaled = true};
    if (residence == ncclScalarDevice) {
      op.scalarAddress = scalar;
    } else {
      host::copy(op.scalar.data(), scalar, elementSize(type));
    }
    LockGuard lock(mutex_);
    created_[next_] = {type, op};
    return static_cast<ncclRedOp_t>(next_++);
  }

  void destroy(ncclRedOp_t op) {
    LockGuard lock(mutex_);
    if (created_.erase(op) == 0) {
      throw NcclError(
          ncclInvalidArgument, "redOpDestroy: op is " + std::to_string(op) +
                                   ", wanted one that redOpCreatePreMulSum made for this "
                                   "communicator");
    }
  }

  // Returns the operator for which `op` stands, one of NCCL's or a created one. Throws NcclError
  // also if `op` was created for a different type than `type`.
  Operator resolve(ncclRedOp_t op, ncclDataType_t type) const {
    if (op >= ncclSum && op < ncclNumOps) return {.reduction = op};
    LockGuard lock(mutex_);
    const auto found = created_.find(op);
    if (found == created_.end()) {
      throw NcclError(
          ncclInvalidArgument, "op is " + std::to_string(op) +
                                   ", wanted a ncclRedOp_t or one created for this communicator");
    }
    if (found->second.type != type) {
      throw NcclError(
          ncclInvalidArgument, std::string("op was created for ") + typeName(found->second.type) +
                                   ", the data is " + typeName(type));
    }
    return found->second.op;
  }

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
