#include "operation/Types.hpp"

#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>

#include <cstring>

#include "operation/Buffers.hpp"

namespace torchcomms_pg {

namespace {

using c10::ScalarType;
using c10d::ReduceOp;

std::optional<ncclDataType_t> ncclType(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Char: return ncclInt8;
    case ScalarType::Byte:
    case ScalarType::Bool: return ncclUint8;
    case ScalarType::Int: return ncclInt32;
    case ScalarType::UInt32: return ncclUint32;
    case ScalarType::Long: return ncclInt64;
    case ScalarType::UInt64: return ncclUint64;
    case ScalarType::Half: return ncclFloat16;
    case ScalarType::BFloat16: return ncclBfloat16;
    case ScalarType::Float: return ncclFloat32;
    case ScalarType::Double: return ncclFloat64;
    case ScalarType::Float8_e4m3fn: return ncclFloat8e4m3;
    case ScalarType::Float8_e5m2: return ncclFloat8e5m2;
    default: return std::nullopt;
  }
}

bool isBitwise(const ReduceOp& op) {
  return op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
}

// Returns the signed type of the same width: torch has no bitwise operations for the wider unsigned
// types, and these operations ignore the sign.
ScalarType bitType(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::UInt16: return ScalarType::Short;
    case ScalarType::UInt32: return ScalarType::Int;
    case ScalarType::UInt64: return ScalarType::Long;
    default: return dtype;
  }
}

std::optional<ncclRedOp_t> ncclOp(const ReduceOp& op, ScalarType dtype) {
  if (dtype == ScalarType::Bool) {
    // A bool is 0 or 1 in a byte, and a sum could be larger. So SUM and PRODUCT mean "or" and
    // "and", as in ProcessGroupNCCL.
    switch (static_cast<ReduceOp::RedOpType>(op)) {
      case ReduceOp::SUM:
      case ReduceOp::MAX:
      case ReduceOp::BOR: return ncclMax;
      case ReduceOp::PRODUCT:
      case ReduceOp::MIN:
      case ReduceOp::BAND: return ncclMin;
      default: return std::nullopt;
    }
  }
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::SUM: return ncclSum;
    case ReduceOp::PRODUCT: return ncclProd;
    case ReduceOp::MIN: return ncclMin;
    case ReduceOp::MAX: return ncclMax;
    case ReduceOp::AVG: return ncclAvg;
    default: return std::nullopt;
  }
}

at::Tensor preMulFactor(const char* what, const ReduceOp& op, ScalarType dtype) {
  TORCH_CHECK_TYPE(
      dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
          dtype == ScalarType::Double,
      what, ": reduce op PREMUL_SUM takes float16, bfloat16, float32 or float64 tensors, got ",
      c10::toString(dtype));
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(
      supplement != nullptr, what,
      ": reduce op PREMUL_SUM carries no factor; make it with "
      "torch.distributed._make_nccl_premul_sum(factor)");
  if (supplement->tensor_factor.defined()) {
    return supplement->tensor_factor.detach().to(dtype).reshape({1});
  }
  return at::full({1}, supplement->double_factor, at::TensorOptions().dtype(dtype));
}

}  // namespace

WireType wireType(ScalarType dtype) {
  const auto type = ncclType(dtype);
  if (type && !c10::isFloat8Type(dtype)) {  // NCCL has float8 only from 2.24 on
    return {*type, 1};
  }
  if (c10::isComplexType(dtype)) {
    const auto real = ncclType(c10::toRealValueType(dtype));
    if (real) {
      return {*real, 2};
    }
  }
  return {ncclInt8, c10::elementSize(dtype)};
}

const char* name(const ReduceOp& op) {
  switch (static_cast<ReduceOp::RedOpType>(op)) {
    case ReduceOp::SUM: return "SUM";
    case ReduceOp::AVG: return "AVG";
    case ReduceOp::PRODUCT: return "PRODUCT";
    case ReduceOp::MIN: return "MIN";
    case ReduceOp::MAX: return "MAX";
    case ReduceOp::BAND: return "BAND";
    case ReduceOp::BOR: return "BOR";
    case ReduceOp::BXOR: return "BXOR";
    case ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
    case ReduceOp::UNUSED: break;
  }
  return "UNUSED";
}

Reduction::Reduction(const char* what, const ReduceOp& op, ScalarType dtype)
    : op_(op), dtype_(dtype) {
  TORCH_CHECK_VALUE(
      static_cast<ReduceOp::RedOpType>(op_) != ReduceOp::UNUSED, what,
      ": reduce op UNUSED cannot be used; pass e.g. ReduceOp.SUM");
  if (isBitwise(op_)) {
    TORCH_CHECK_VALUE(
        c10::isIntegralType(dtype, /*includeBool=*/true) || c10::isBarebonesUnsignedType(dtype),
        what, ": reduce op ", name(), " takes integer or bool tensors, got ", c10::toString(dtype));
  }
  TORCH_CHECK_TYPE(
      !(dtype == ScalarType::Bool && op_ == ReduceOp::AVG), what,
      ": reduce op AVG cannot be used with bool tensors; convert to float first");

  auto wireDtype = dtype;
  size_t factor = 1;
  if (c10::isComplexType(dtype)) {
    TORCH_CHECK_VALUE(
        c10d::isComplexViewAsRealAllowed(op_), what, ": reduce op ", name(),
        " is not defined for complex tensors (", c10::toString(dtype),
        "); use SUM, AVG or PREMUL_SUM");
    wireDtype = c10::toRealValueType(dtype);
    factor = 2;
  }
  if (op_ == ReduceOp::PREMUL_SUM) {
    factor_ = preMulFactor(what, op_, wireDtype);
  }

  const auto type = ncclType(wireDtype);
  const bool builtin = op_ == ReduceOp::PREMUL_SUM || ncclOp(op_, wireDtype).has_value();
  if (type && builtin) {
    wire_ = {*type, factor};
    return;
  }
  // Of the dtypes that NCCL lacks, torch has arithmetic for int16 and none for uint16.
  TORCH_CHECK_VALUE(
      isBitwise(op_) || dtype == ScalarType::Short, what, ": reduce op ", name(),
      " is not supported for dtype ", c10::toString(dtype), "; convert the tensor, for example to ",
      c10::isFloat8Type(dtype) ? "bfloat16" : "int32");
  onWire_ = false;
  wire_ = wireType(dtype);
}

Operator Reduction::wireOp() const {
  if (op_ != ReduceOp::PREMUL_SUM) {
    return {.reduction = *ncclOp(op_, dtype_)};
  }
  Operator scaled{.reduction = ncclSum, .scaled = true};
  if (factor_.is_cpu()) {
    std::memcpy(scaled.scalar.data(), factor_.data_ptr(), factor_.element_size());
  } else {
    scaled.scalarAddress = factor_.data_ptr();
  }
  return scaled;
}

void Reduction::combine(const at::Tensor& out, const at::Tensor& inputs) const {
  const WritePermission permission(out);
  const auto bits = isBitwise(op_) ? bitType(out.scalar_type()) : out.scalar_type();
  const auto target = bits == out.scalar_type() ? out : out.view(bits);
  const auto parts = bits == out.scalar_type() ? inputs : inputs.view(bits);
  target.copy_(parts.select(0, 0));
  for (int64_t i = 1; i < parts.size(0); ++i) {
    const auto part = parts.select(0, i);
    switch (static_cast<ReduceOp::RedOpType>(op_)) {
      case ReduceOp::BAND: target.bitwise_and_(part); break;
      case ReduceOp::BOR: target.bitwise_or_(part); break;
      case ReduceOp::BXOR: target.bitwise_xor_(part); break;
      case ReduceOp::SUM:
      case ReduceOp::AVG: target.add_(part); break;
      case ReduceOp::PRODUCT: target.mul_(part); break;
      case ReduceOp::MIN: target.copy_(at::minimum(target, part)); break;
      case ReduceOp::MAX: target.copy_(at::maximum(target, part)); break;
      default: TORCH_INTERNAL_ASSERT(false, "not a local reduction: ", name());
    }
  }
  if (op_ == ReduceOp::AVG) {
    target.div_(parts.size(0), "trunc");
  }
}

}  // namespace torchcomms_pg
