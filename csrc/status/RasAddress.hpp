// The address on which this host's processes answer NCCL's RAS client.
#pragma once

#include <string>

#include "status/Folder.hpp"

namespace torchcomms_pg::status {

// Listens on "127.0.0.1:PORT", "localhost:PORT" or "[::1]:PORT". All processes of this user may
// listen on it, as NCCL's do: the kernel gives each connection to one of them, so that the others
// go on answering when one ends. Raises std::runtime_error with what is wrong with the address,
// which must be local, since anyone who can reach it may ask.
Descriptor listenForRas(const std::string& address);

}  // namespace torchcomms_pg::status
