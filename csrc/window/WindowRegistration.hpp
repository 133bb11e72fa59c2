// State of the tensors that the ranks have registered with a window.
#pragma once

#include <c10/core/Stream.h>

#include <unordered_set>

#include "window/Window.hpp"

namespace torchcomms_pg {

struct Window::Registration {
  ncclWindow_t handle = nullptr;   // null until registered, and if NCCL cannot map the memory
  int signal = 0;                  // sigIdx of the window's signals
  at::Tensor tensor;               // undefined unless the window owns it
  std::vector<Part> parts;         // descriptions of the tensors, by rank
  std::vector<at::Tensor> mapped;  // the ranks' tensors, by rank; only on an accelerator
  std::vector<std::atomic<uint64_t>> sent;    // number of signals sent, by peer
  std::vector<std::atomic<uint64_t>> waited;  // number of signals taken, by peer

  Mutex mutex;
  WorkPtr lastPut GUARDED_BY(mutex);  // last asynchronous put; earlier puts end before it
  WorkPtr last GUARDED_BY(mutex);     // last asynchronous operation
  // Streams that synchronous puts have used.
  std::unordered_set<c10::Stream> used GUARDED_BY(mutex);

  explicit Registration(int size) : sent(size), waited(size) {}

  WorkPtr pendingPut() {
    LockGuard lock(mutex);
    return lastPut;
  }
  WorkPtr pending() {
    LockGuard lock(mutex);
    return last;
  }
  // Drops the Works, which hold references to the communicator.
  void forgetWorks() {
    LockGuard lock(mutex);
    lastPut.reset();
    last.reset();
  }
  void note(const c10::Stream& stream) {
    LockGuard lock(mutex);
    used.insert(stream);
  }
  std::unordered_set<c10::Stream> streams() {
    LockGuard lock(mutex);
    return used;
  }
  void note(const WorkPtr& work, bool isPut) {
    LockGuard lock(mutex);
    last = work;
    if (isPut) {
      lastPut = work;
    }
  }
};

}  // namespace torchcomms_pg
