// The flight recorders of a communicator.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/AtomicShared.hpp"
#include "base/Mutex.hpp"
#include "operation/Group.hpp"
#include "operation/PreparedOp.hpp"
#include "recorder/RecordedOp.hpp"

namespace torchcomms_pg {

class CommHandle;
class Identity;
class Observer;

// The recorders in which a communicator's operations are entered. Thread-safe.
class RecorderSet {
 public:
  RecorderSet(const Identity& self, const CommHandle& library) : self_(self), library_(library) {}

  // Sets the description of `group`, which add() passes to recorders.
  void describe(Group& group, std::string description);

  // Adds a recorder, which gets an entry for each operation from the next one on. The process's
  // recorder is written to its file when the communicator fails. Returns false if the recorder was
  // added before, or is set to record nothing.
  bool add(std::shared_ptr<FlightRecorder> recorder);
  void remove(const FlightRecorder* recorder);
  // Adds the recorders of `former`, which this communicator replaces.
  void inherit(const RecorderSet& former);

  // Returns whether there are recorders. Without them, an operation pays only for this check.
  bool any() const { return any_.load(std::memory_order_acquire); }

  // Enters an operation that is being issued. An operation that a graph captures is only counted.
  void record(PreparedOp& call);

  // If the process's recorder is in this set, writes it to its file, and has `observer` ask other
  // ranks to write theirs. Only the first call does so.
  void dump(Observer& observer);

 private:
  const Identity& self_;
  const CommHandle& library_;
  Mutex mutex_;  // guards changes, and the group's description
  std::atomic<bool> any_{false};
  AtomicShared<const std::vector<RecorderGroup>> recorders_;
  std::once_flag dumped_;
};

}  // namespace torchcomms_pg
