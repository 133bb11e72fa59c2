// The address on which this host's processes answer NCCL's RAS client.
#pragma once

#include <string>

#include "diagnosis/status/Folder.hpp"

namespace torchcomms_pg::status {

// Returns a socket that listens on a loopback address, such as "127.0.0.1:PORT", "localhost:PORT"
// or "[::1]:PORT". All processes of this user may listen on one address, as NCCL's processes do:
// the kernel gives each connection to one of them. Raises std::runtime_error with the reason if the
// address is unusable. Other addresses are refused, since anyone who can reach them may ask.
FileDescriptor listenForRas(const std::string& address);

}  // namespace torchcomms_pg::status
