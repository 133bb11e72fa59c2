// What a window has of the tensors that the ranks have registered with it.
#pragma once

#include <c10/core/Stream.h>

#include <unordered_set>

#include "comm/Window.hpp"

namespace torchcomms_pg {

struct Window::Registration {
  ncclWindow_t handle = nullptr;
  int signal = 0;                             // sigIdx
  at::Tensor tensor;                          // where the window owns it
  std::vector<Part> parts;                    // by rank
  std::vector<at::Tensor> mapped;             // their elements, by rank; on an accelerator only
  std::vector<std::atomic<uint64_t>> sent;    // signals, by peer
  std::vector<std::atomic<uint64_t>> waited;  // likewise

  std::mutex mutex;                      // of what follows
  WorkPtr lastPut;                       // asynchronous; those before it have ended when it has
  WorkPtr last;                          // likewise, of all operations
  std::unordered_set<c10::Stream> used;  // of an accelerator, by synchronous puts

  explicit Registration(int size) : sent(size), waited(size) {}

  WorkPtr pendingPut() {
    std::lock_guard lock(mutex);
    return lastPut;
  }
  WorkPtr pending() {
    std::lock_guard lock(mutex);
    return last;
  }
  // They keep the communicator.
  void forgetWorks() {
    std::lock_guard lock(mutex);
    lastPut.reset();
    last.reset();
  }
  void note(const c10::Stream& stream) {
    std::lock_guard lock(mutex);
    used.insert(stream);
  }
  std::unordered_set<c10::Stream> streams() {
    std::lock_guard lock(mutex);
    return used;
  }
  void note(const WorkPtr& work, bool isPut) {
    std::lock_guard lock(mutex);
    last = work;
    if (isPut) {
      lastPut = work;
    }
  }
};

}  // namespace torchcomms_pg
