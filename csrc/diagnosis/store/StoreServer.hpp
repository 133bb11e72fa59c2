// Whether the server of the job's store is still there.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/FileDescriptor.hpp"
#include "base/Mutex.hpp"

namespace torchcomms_pg {

// An idle connection to the server of a TCPStore. TCPStore prints a C++ trace for each call that
// finds its server gone, for example since the rank that serves it has ended. So this project's
// threads ask this connection before each of their calls. A server that ends between the question
// and the call is still reported by the store. Thread-safe.
class StoreServer {
 public:
  // Returns the object for the server of `store`, or null if the store has no server. All callers
  // in a process share one connection to a server.
  static std::shared_ptr<StoreServer> of(const c10::intrusive_ptr<c10d::Store>& store);
  static std::shared_ptr<StoreServer> at(const std::string& host, uint16_t port);

  StoreServer(std::string host, uint16_t port) : host_(std::move(host)), port_(port) {}

  // Raises c10::DistStoreError if no process serves the store any more. Blocks for at most 2 s, and
  // usually not at all.
  void check();
  // Returns "HOST:PORT".
  std::string address() const { return host_ + ":" + std::to_string(port_); }

 private:
  const std::string host_;
  const uint16_t port_;
  Mutex mutex_;
  FileDescriptor connection_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg
