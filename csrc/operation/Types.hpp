// Translates torch's dtypes and reduce operations into NCCL's. No other file does.
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <optional>

#include "base/TorchCompat.hpp"
#include "nccl/Collective.hpp"

namespace torchcomms_pg {

// A type of the library. One element of the torch dtype is moved as `factor` elements of `type`.
struct WireType {
  ncclDataType_t type;
  size_t factor;
};

// Returns the type for operations that only move data. A complex element is moved as two real ones.
// Dtypes that NCCL lacks, and float8, which NCCL has only from 2.24 on, are moved as bytes.
WireType wireType(c10::ScalarType dtype);

// Returns the name of a reduce operation, e.g. "SUM".
const char* name(const c10d::ReduceOp& op);

// Reduction of tensors of one dtype with one operation.
class Reduction {
 public:
  // Chooses how to reduce. Throws ValueError or TypeError, naming `what` (the calling operation),
  // if `op` cannot reduce the dtype.
  Reduction(const char* what, const c10d::ReduceOp& op, c10::ScalarType dtype);

  // Returns whether the library reduces the dtype with the operation. If not (most bitwise
  // operations, int16), the caller moves the ranks' inputs and reduces them with combine().
  bool onWire() const { return onWire_; }
  WireType wire() const { return wire_; }
  const char* name() const { return torchcomms_pg::name(op_); }

  // Returns the operator for the library. Call only if onWire(). Copies a factor in host memory. A
  // factor on the accelerator is read when the operation runs, so keep factor() until then.
  Operator wireOp() const;
  const at::Tensor& factor() const { return factor_; }  // defined only for pre-multiplied sums

  // Sets out = inputs[0] op inputs[1] op ..., in this order. The first dimension of `inputs` is the
  // number of inputs; `out` has the other dimensions.
  void combine(const at::Tensor& out, const at::Tensor& inputs) const;

 private:
  c10d::ReduceOp op_;
  c10::ScalarType dtype_;
  WireType wire_{ncclInt8, 1};
  bool onWire_ = true;
  at::Tensor factor_;  // factor of a pre-multiplied sum: one element of the dtype
};

}  // namespace torchcomms_pg
