// What is left to do of asynchronous operations in host memory.
#pragma once

#include <atomic>

#include "device/WorkerStream.hpp"
#include "handle/CommHandle.hpp"

namespace torchcomms_pg {

// The deferred operations of a communicator: collectives, which its worker finishes, and messages,
// which the library's thread moves, unless a thread that waits for them does so first. An
// accelerator defers none. Thread-safe.
class DeferredOps {
 public:
  explicit DeferredOps(const CommHandle& library) : library_(library) {}

  WorkerStream& worker() { return worker_; }

  // Records that a message was deferred.
  void noteMessage() { messages_.store(true, std::memory_order_relaxed); }
  // Makes the library's thread move deferred messages.
  void serveMessages() {
    if (messages_.load(std::memory_order_relaxed) &&
        messages_.exchange(false, std::memory_order_relaxed)) {
      library_.api().serveMessages(library_.get());
    }
  }
  // Makes the worker and the library's thread finish deferred operations, for a caller that needs
  // their end but does not run them itself.
  void wake() {
    worker_.wake();
    serveMessages();
  }

 private:
  const CommHandle& library_;
  WorkerStream worker_{"tcpg_worker"};
  std::atomic<bool> messages_{false};  // whether any was deferred since the last serveMessages()
};

}  // namespace torchcomms_pg
