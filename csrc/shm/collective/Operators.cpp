#include "shm/collective/Operators.hpp"

#include <string>

namespace torchcomms_pg::shm {

ncclRedOp_t Operators::createPreMulSum(
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

void Operators::destroy(ncclRedOp_t op) {
  LockGuard lock(mutex_);
  if (created_.erase(op) == 0) {
    throw NcclError(
        ncclInvalidArgument, "redOpDestroy: op is " + std::to_string(op) +
                                 ", wanted one that redOpCreatePreMulSum made for this "
                                 "communicator");
  }
}

Operator Operators::resolve(ncclRedOp_t op, ncclDataType_t type) const {
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

}  // namespace torchcomms_pg::shm
