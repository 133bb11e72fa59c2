// Chooses the library for a device, and joins the ranks through it.
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
  LibrarySearch library;      // where to find libnccl
  bool highPriority = false;  // priority of the communicator's stream
  NcclConfig config;
  bool named = false;      // true to give the communicator the group's name in NCCL
  int ranksPerRoot = 128;  // see rendezvousOverNccl()
};

// Makes Gloo's connections between the ranks that share the store. Collective. `acrossHosts` is
// true if the ranks are on several hosts.
using ConnectGloo = std::function<gloo::Connections(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool acrossHosts)>;

// Joins the ranks for CPU tensors: through shared memory inside each host or container, and through
// Gloo between them. `connectGloo` makes Gloo's connections; if it is null, several hosts are an
// error. If this process sees an accelerator, Gloo's connections are made only for the first CPU
// tensor: a group without CPU tensors would waste a socket for every peer. Collective; returns when
// every rank has joined. Raises CommError, or the exception of `connectGloo`. `peers`, unless null,
// receives the ranks' processes, by rank; for a single rank it is empty.
std::shared_ptr<Communicator> connectHosts(
    const RendezvousInfo& info, const ConnectGloo& connectGloo, std::vector<Peer>* peers = nullptr);

// Joins the ranks through Gloo alone, even on one host, as if each rank had its own host.
std::shared_ptr<Communicator> connectThroughGloo(
    const RendezvousInfo& info, const ConnectGloo& connectGloo);

// Joins the ranks through the library for tensors of `device`: libnccl for CUDA, otherwise the
// library that useHostStreams() has named. Collective; returns when every rank has arrived. If
// `info.peer` is set, the call may return when that peer has arrived, with a communicator of two
// ranks: see Identity::pair(). Raises CommError, LibraryError, std::invalid_argument for a
// configuration that the library does not accept, or torch's error if the device does not exist.
std::shared_ptr<Communicator> connect(
    const RendezvousInfo& info, c10::Device device, const AcceleratorOptions& options);

// Raises RuntimeError if a graph captures the device's current stream: ranks cannot join then.
void refuseCapture(const std::string& group, c10::Device device);

// Raises ValueError, naming `what`, unless the device is a CUDA device or a simulated accelerator.
void checkCarried(const char* what, const std::string& group, c10::Device device);

// Declares this type of device a simulated accelerator: its memory is on the host, and the native
// handles of its streams point to a host::HostStream. `library` is the path of a library with
// NCCL's API for such devices; if the path is empty, they use shared memory.
void useHostStreams(c10::DeviceType type, const std::string& library);

}  // namespace torchcomms_pg
