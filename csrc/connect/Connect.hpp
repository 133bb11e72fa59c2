// Choice of the library that serves a device, and the ways to join its ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/Communicator.hpp"
#include "connect/Rendezvous.hpp"
#include "gloo/Comm.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

struct AcceleratorOptions {
  LibrarySearch library;      // the library for CUDA
  bool highPriority = false;  // priority of the communicator's stream
  NcclConfig config;
  bool named = false;      // tells NCCL the group's name, see NcclConfig::named()
  int ranksPerRoot = 128;  // see rendezvousOverNccl()
};

// Makes Gloo's connections between the ranks that meet in the store; collective over them.
// `acrossHosts`: the ranks are not all on one host.
using ConnectGloo = std::function<gloo::Connections(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool acrossHosts)>;

// Joins the ranks for CPU tensors: through shared memory, or, where they are on several hosts or in
// several containers, through memory inside each and Gloo between them, whose connections
// `connectGloo` makes (null: that is an error). Where there are accelerators, Gloo's connections
// are made with the first CPU tensor, which may never come: they are a socket for each other rank,
// in each group. Collective; returns when every rank has joined. Raises CommError, or what
// `connectGloo` does. `peers`: receives the ranks' processes, by rank; empty where this rank is
// alone.
std::shared_ptr<Communicator> connectHosts(
    const RendezvousInfo& info, const ConnectGloo& connectGloo, std::vector<Peer>* peers = nullptr);

// Does the same through Gloo wherever the ranks are, as if each had a host of its own.
std::shared_ptr<Communicator> connectThroughGloo(
    const RendezvousInfo& info, const ConnectGloo& connectGloo);

// Joins the ranks through the library for tensors of `device`: libnccl for CUDA, else the one that
// useHostStreams() has named. Collective; returns when every rank has come, or with `info.peer`
// both have, see Communicator::pair(). Raises CommError, LibraryError, std::invalid_argument for a
// configuration that no library takes, or what torch raises where there is no such device.
std::shared_ptr<Communicator> connect(
    const RendezvousInfo& info, c10::Device device, const AcceleratorOptions& options);

// Raises RuntimeError where the current stream of the device records a graph, in which no ranks can
// be joined.
void refuseCapture(const std::string& group, c10::Device device);

// Raises ValueError, naming `what`, where tensors of the device cannot be communicated at all.
void checkCarried(const char* what, const std::string& group, c10::Device device);

// Declares devices of this type a simulated accelerator: their memory is on the host, and the
// native handles of their streams point to host::HostStream. `library`: path of a library with
// NCCL's API for such devices, in place of shared memory; may be empty.
void useHostStreams(c10::DeviceType type, const std::string& library);

}  // namespace torchcomms_pg
