// Communicators of accelerators.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "comm/Communicator.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

// What the ranks of a new communicator have in common, but `rank` and `device`.
struct Meeting {
  c10d::Store& store;
  int rank;
  int size;
  Group group;
  std::string members;  // see joinOnHost
  Milliseconds timeout;
};

struct AcceleratorOptions {
  LibrarySearch library;      // for CUDA
  bool highPriority = false;  // of the communicator's stream
};

// Joins the ranks through the library for tensors of `device`: libnccl for
// CUDA; shared memory where useHostStreams() says so. Collective; returns when
// every rank has come. Raises CommError, LibraryError, or what torch raises
// where there is no such device.
std::shared_ptr<Communicator> connect(
    const Meeting& meeting, c10::Device device, const AcceleratorOptions& options);

// Devices of this type have their memory on the host, and the native handles
// of their streams point to shm::HostStream: a simulated accelerator.
void useHostStreams(c10::DeviceType type);

}  // namespace torchcomms_pg
