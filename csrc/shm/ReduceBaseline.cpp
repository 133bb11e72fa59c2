#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shm/ReduceKernels.hpp"

namespace torchcomms_pg::shm {
namespace {
#include "shm/SmallFloat.inl"

#include "shm/ReduceKernels.inl"
}  // namespace

const ReduceKernels kBaselineKernels{reduceAny, scaleAny};

}  // namespace torchcomms_pg::shm
