// Asks the processes of this host for their status.
#pragma once

#include <chrono>

#include "status/Folder.hpp"
#include "status/ProcessStatus.hpp"

namespace torchcomms_pg::status {

// Names this host, and tells it from another of that name: it has its own boot and processes.
std::string ownPlace();

// Asks all processes of the folder, this one too, at the same time. Returns once all have answered
// that are not stopped, or after `patience`. Raises what the folder raises.
HostStatus gather(const Folder& folder, std::chrono::milliseconds patience);

}  // namespace torchcomms_pg::status
