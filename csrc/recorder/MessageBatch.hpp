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
    first_ = 0;
    return std::exchange(open_, open);
  }

  // Returns the number of the batch's first message, or 0 outside of a batch. `number`: the number
  // of the message that the thread issues, among its group's messages.
  static uint64_t first(uint64_t number) {
    if (open_ && first_ == 0) {
      first_ = number;
    }
    return first_;
  }

 private:
  static inline thread_local bool open_ = false;
  static inline thread_local uint64_t first_ = 0;
};

}  // namespace torchcomms_pg
