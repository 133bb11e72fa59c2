#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "host/ReduceKernels.hpp"

namespace torchcomms_pg::host {
namespace {
#include "host/SmallFloat.inl"

#include "host/ReduceKernels.inl"
}  // namespace

const ReduceKernels kBaselineKernels{reduceAny, scaleAny};

}  // namespace torchcomms_pg::host
