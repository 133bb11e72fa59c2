// Translation of torch's dtypes and reduce operations into NCCL's. No other file translates them.
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <optional>

#include "base/TorchCompat.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// A type of the library; `factor` elements of it carry one element of the torch dtype.
struct WireType {
  ncclDataType_t type;
  size_t factor;
};

// Returns the type for operations that only move data. Dtypes that NCCL lacks are moved as bytes.
WireType wireType(c10::ScalarType dtype);

// Returns the name of a reduce operation, e.g. "SUM".
const char* name(const c10d::ReduceOp& op);

// Reduction of tensors of one dtype with one operation.
class Reduction {
 public:
  // Chooses how to reduce. Throws ValueError or TypeError, naming `what` (the calling operation),
  // if the dtype cannot be reduced with the operation.
  Reduction(const char* what, const c10d::ReduceOp& op, c10::ScalarType dtype);

  // Returns whether the library reduces this pair. If not (bitwise operations, int16), inputs are
  // gathered and reduced with combine().
  bool onWire() const { return onWire_; }
  WireType wire() const { return wire_; }
  const char* name() const { return torchcomms_pg::name(op_); }

  // The library's handle for the reduce operation, to launch with in this scope.
  class Handle {
   public:
    Handle(const Reduction& reduction, const NcclApi& api, ncclComm_t comm);
    ~Handle();
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    // Returns ncclSuccess, or the error of making the handle, which is then not to be used.
    ncclResult_t made() const { return made_; }
    operator ncclRedOp_t() const { return op_; }

   private:
    const NcclApi& api_;
    const ncclComm_t comm_;
    ncclRedOp_t op_ = ncclSum;
    ncclResult_t made_ = ncclSuccess;
    bool custom_;
  };

  // Sets out = inputs[0] op inputs[1] op ..., in this order. The first dimension of `inputs` counts
  // the inputs; the others are the dimensions of `out`.
  void combine(const at::Tensor& out, const at::Tensor& inputs) const;

 private:
  c10d::ReduceOp op_;
  c10::ScalarType dtype_;
  WireType wire_{ncclInt8, 1};
  bool onWire_ = true;
  at::Tensor factor_;  // factor of a pre-multiplied sum: one element of the dtype
};

}  // namespace torchcomms_pg
