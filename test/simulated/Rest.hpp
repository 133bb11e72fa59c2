// Streams at rest: what has not run by then runs only after something from outside of them. Knows
// nothing of torch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "Mark.hpp"

namespace simulated {

// Number of tasks that have ended, of all streams: changes with each step from one to another.
inline std::atomic<uint64_t> tasksEnded{0};

// The wait of a stream's thread, which another thread may ask for.
class Wait {
 public:
  // Called by the stream's thread: runs `body`, which waits until `mark` is set.
  template <class Body>
  void during(std::shared_ptr<Mark> mark, Body&& body) {
    set(std::move(mark));
    body();
    set(nullptr);
  }

  // Returns whether the thread waits for a mark that is not set.
  bool lasts() {
    const std::lock_guard lock(mutex_);
    return mark_ && !mark_->isSet();
  }

 private:
  void set(std::shared_ptr<Mark> mark) {
    const std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }

  std::mutex mutex_;
  std::shared_ptr<Mark> mark_;
};

// Returns whether each of the streams is idle or waits. A collective that runs, and a delay, are no
// rest.
template <class Streams>
bool atRest(const Streams& streams) {
  const auto ended = tasksEnded.load();
  for (auto* const stream : streams) {
    if (!stream->idle() && !stream->waits()) return false;
  }
  return tasksEnded.load() == ended;
}

}  // namespace simulated
