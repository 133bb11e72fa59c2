// One order of the kernels of all communicators of a device.
#pragma once

#include <functional>
#include <vector>

#include "host/HostStream.hpp"

namespace emulated {

// Runs `launch`, which queues kernels in these streams. With NCCL_LAUNCH_ORDER_IMPLICIT=1, and
// since NCCL 2.26, the kernels wait until those of the device's launch before have ended: so it is
// before CUDA 12.3 (src/enqueue.cc, ncclLaunchPrepare: ncclImplicitOrderSerial), where it is the
// order that the user guide asks for in "Using multiple NCCL communicators concurrently". Since
// CUDA 12.3 they only begin in that order. Else streams alone order them.
void inLaunchOrder(
    int device, const std::vector<torchcomms_pg::host::HostStream*>& streams,
    const std::function<void()>& launch);

}  // namespace emulated
