// The flight recorders of a communicator.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/RecordedOp.hpp"
#include "operation/Group.hpp"
#include "operation/PreparedOp.hpp"

namespace torchcomms_pg {

class Communicator;

// The recorders that a communicator's operations are entered in. Thread-safe.
class RecorderSet {
 public:
  explicit RecorderSet(Communicator& comm) : comm_(comm) {}

  // Sets the description, which add() tells recorders.
  void describe(Group& group, std::string description);

  // Adds a recorder, which gets an entry for each operation from the next one on. A failure writes
  // the process's recorder to its file. False: it has been there already, or is to record nothing.
  bool add(std::shared_ptr<FlightRecorder> recorder);
  void remove(const FlightRecorder* recorder);
  // Adds the recorders of another communicator, which this one replaces.
  void inherit(const RecorderSet& former);

  // Returns whether there are any. An operation without recorders pays for nothing else.
  bool any() const { return any_.load(std::memory_order_acquire); }

  // Enters an operation that is being issued; one that a graph captures is only counted.
  void record(PreparedOp& call);

  // Writes the process's recorder to its file, where it is in this set, and asks other ranks to
  // write theirs. Has an effect once.
  void dump();

 private:
  Communicator& comm_;
  std::mutex mutex_;  // guards changes, and the group's description
  std::atomic<bool> any_{false};
  std::shared_ptr<const std::vector<RecorderGroup>> recorders_;  // accessed by std::atomic_load
  std::once_flag dumped_;
};

}  // namespace torchcomms_pg
