// The address on which this host's processes answer NCCL's client of RAS.
#pragma once

#include <string>

#include "status/Folder.hpp"

namespace torchcomms_pg::status {

// Listens on "127.0.0.1:PORT", "localhost:PORT" or "[::1]:PORT". All processes of this user may
// listen there, as NCCL's do: the kernel gives each connection to one of them, so that others go on
// where one ends. Raises std::runtime_error that says what is wrong with the address: whoever
// reaches it may ask, so that it has to be this host's own.
Descriptor listenForRas(const std::string& address);

}  // namespace torchcomms_pg::status
