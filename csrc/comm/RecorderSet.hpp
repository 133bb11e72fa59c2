// The flight recorders of a communicator.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/Group.hpp"
#include "comm/PreparedOp.hpp"
#include "comm/RecordedOp.hpp"

namespace torchcomms_pg {

class Communicator;

// Thread-safe.
class RecorderSet {
 public:
  explicit RecorderSet(Communicator& comm) : comm_(comm) {}

  // Sets the description, which add() tells recorders.
  void describe(Group& group, std::string description);

  // From the next operation on, `recorder` has an entry for each. Where it is the process's, a
  // failure has it written to its file. False: it has been there already, or is to record nothing.
  bool add(std::shared_ptr<FlightRecorder> recorder);
  void remove(const FlightRecorder* recorder);
  // Adds those of another communicator, which this one replaces.
  void inherit(const RecorderSet& former);

  // Whether there are any: all that an operation costs where there are none.
  bool any() const { return any_.load(std::memory_order_acquire); }

  // Enters an operation that is being issued.
  void record(PreparedOp& call);

  // Writes the process's recorder to its file, where it is among these, and has other ranks do so.
  // Has an effect once.
  void dump();

 private:
  Communicator& comm_;
  std::mutex mutex_;  // of changes, and of the group's description
  std::atomic<bool> any_{false};
  std::shared_ptr<const std::vector<RecorderGroup>> recorders_;  // by std::atomic_load
  std::once_flag dumped_;
};

}  // namespace torchcomms_pg
