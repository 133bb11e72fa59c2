// Choice of the library for a device, and functions that join the device's ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/Communicator.hpp"
#include "connect/Rendezvous.hpp"
#include "gloo/Comm.hpp"
#include "nccl/Libnccl.hpp"

namespace torchcomms_pg {

struct AcceleratorOptions {
  LibrarySearch library;      // the library for CUDA
  bool highPriority = false;  // priority of the communicator's stream
  NcclConfig config;
  bool named = false;      // names the communicator in NCCL like the group, see NcclConfig::named()
  int ranksPerRoot = 128;  // see rendezvousOverNccl()
};

// Makes Gloo's connections between the ranks that share the store; collective. `acrossHosts` is
// true if the ranks are not all on one host.
using ConnectGloo = std::function<gloo::Connections(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool acrossHosts)>;

// Joins the ranks for CPU tensors: through shared memory, or, if they are on several hosts or in
// several containers, through shared memory inside each and Gloo between them. `connectGloo` makes
// Gloo's connections; if it is null, several hosts are an error. If this process sees an
// accelerator, the first CPU tensor makes Gloo's connections, since a group without CPU tensors
// would waste a socket for each other rank. Collective; returns when every rank has joined. Raises
// CommError, or the exception of `connectGloo`. `peers` receives the ranks' processes, by rank, and
// is empty for a single rank.
std::shared_ptr<Communicator> connectHosts(
    const RendezvousInfo& info, const ConnectGloo& connectGloo, std::vector<Peer>* peers = nullptr);

// Does the same through Gloo even on one host, as if each rank had its own host.
std::shared_ptr<Communicator> connectThroughGloo(
    const RendezvousInfo& info, const ConnectGloo& connectGloo);

// Joins the ranks through the library for tensors of `device`: libnccl for CUDA, otherwise the
// library that useHostStreams() has named. Collective; returns when every rank has arrived, or,
// with `info.peer`, when both ranks have, see Communicator::pair(). Raises CommError, LibraryError,
// std::invalid_argument for a configuration that the library does not accept, or torch's error if
// the device does not exist.
std::shared_ptr<Communicator> connect(
    const RendezvousInfo& info, c10::Device device, const AcceleratorOptions& options);

// Raises RuntimeError if the current stream of the device records a graph: no ranks can join then.
void refuseCapture(const std::string& group, c10::Device device);

// Raises ValueError, naming `what`, if tensors of the device cannot be communicated at all.
void checkCarried(const char* what, const std::string& group, c10::Device device);

// Declares devices of this type a simulated accelerator: their memory is on the host, and the
// native handles of their streams point to host::HostStream. `library` is the path of a library
// with NCCL's API for such devices; if it is empty, they use shared memory.
void useHostStreams(c10::DeviceType type, const std::string& library);

}  // namespace torchcomms_pg
