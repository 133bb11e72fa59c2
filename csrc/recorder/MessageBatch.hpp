// Batches of messages that c10d issues one by one.
#pragma once

#include <cstdint>
#include <utility>

namespace torchcomms_pg {

// The batch of the calling thread. Over a backend without coalescing, c10d's batch_isend_irecv
// issues each message by itself, and Python announces the batch, for recorders. A batch is of one
// group.
class MessageBatch {
 public:
  // Opens or ends the thread's batch; returns whether one was open. Batches do not nest.
  static bool set(bool open) {
    thisThreads().first = 0;
    return std::exchange(thisThreads().open, open);
  }

  // Returns the number of the batch's first message, or 0 outside of a batch. `number`: the number
  // of the message that the thread issues, among its group's messages.
  static uint64_t first(uint64_t number) {
    auto& batch = thisThreads();
    if (!batch.open) {
      return 0;
    }
    if (batch.first == 0) {
      batch.first = number;
    }
    return batch.first;
  }

 private:
  struct Batch {
    bool open = false;
    uint64_t first = 0;
  };
  static Batch& thisThreads() {
    static thread_local Batch batch;
    return batch;
  }
};

}  // namespace torchcomms_pg
