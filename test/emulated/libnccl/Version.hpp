// The version of NCCL to emulate: EMULATED_NCCL, such as 2.18, 2.24, 2.27.5 or 2.32; that of the
// newest torch without it.
#pragma once

#include <nccl.h>

namespace emulated {

// Returns the version as ncclGetVersion does, such as 22403 for 2.24.3.
int ncclVersion();

// Returns whether this NCCL has the function, which came with `since`; says so if not. torch's
// libraries import more than an old NCCL has, so all of them are defined; a library that lacks them
// is linked beside (build.py).
bool hasFunction(const char* function, int since);

// Returns whether ncclCommDestroy of a communicator that is not ready returns between
// ncclGroupStartInternal and ncclGroupEndInternal (src/init.cc): the group stays open. If the check
// comes first, only the communicator leaks.
bool destroyLeavesGroupOpen();

// Returns whether ncclCommGetAsyncError completes the communicator's group job (src/init.cc; since
// 2.26).
bool asyncErrorCompletesJobs();

}  // namespace emulated
