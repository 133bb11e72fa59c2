// Asks the processes of this host for their status.
#pragma once

#include <chrono>

#include "diagnosis/status/Folder.hpp"
#include "diagnosis/status/ProcessStatus.hpp"

namespace torchcomms_pg::status {

// Returns the host's name with its boot and pid namespace, which distinguish hosts of one name.
std::string ownPlace();

// Asks all processes of the folder, including this one, at the same time. Returns this host's
// status when all processes except stopped ones have answered, or after `patience`. Raises the
// folder's errors.
HostStatus gather(const Folder& folder, std::chrono::milliseconds patience);

}  // namespace torchcomms_pg::status
