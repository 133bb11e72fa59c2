// A ring buffer of the latest operations, in the schema of c10d's flight recorder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "recorder/OpRecord.hpp"

namespace torchcomms_pg {

// Records the operations of groups. Each operation becomes an entry when it is issued; start() and
// complete() report its progress. If the ring is full, a new entry replaces the oldest.
// Thread-safe.
//
// A message is recorded in a group of its two ranks, "<group>:<rank>-<rank>", as if the pair had
// its own communicator: torch's analyser expects all ranks of an entry's group to have that entry.
// For the same reason, operations on a peer's memory, for which the schema has no names, are
// recorded in a group of the calling rank alone, such as "<group>:put <rank>-><rank>".
class FlightRecorder {
 public:
  // Makes a recorder of the latest `maxEntries` operations; if this is 0, it records nothing.
  // `cppStacks`: records C++ stacks too.
  FlightRecorder(size_t maxEntries, bool cppStacks);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  struct Group;

  // Adds a group, which the recorder owns. `backend`: its name in c10d, or empty. `ranks`: by rank
  // in the group, the global rank. `rank`: this process's rank in the group.
  Group* addGroup(
      const std::string& name, const std::string& description, const std::string& backend,
      const std::vector<int64_t>& ranks, int rank);

  // Sets the version of the library that executes the operations, for the head of dumps.
  void setLibraryVersion(const std::string& version);

  // Adds an entry and returns its place in the ring, which a later entry may take over.
  size_t add(Group& group, std::shared_ptr<const OpRecord> record);
  // Records that the operation has started.
  void start(Group& group, const OpRecord& record);
  // Counts an operation that a graph has captured. Neither the operation nor its replays get an
  // entry.
  void noteCaptured();
  // Records that the operation has completed. `place`: from add(). `source`: the sender of a
  // message, or -1 if unknown.
  void complete(Group& group, const OpRecord& record, size_t place, int source);

  bool cppStacks() const;
  bool enabled() const;
  size_t size() const;
  // Drops the entries but keeps the groups.
  void reset();

  // Returns this process's global rank, which the first group has set, or -1 without a group.
  int rank() const;

  // One of the latest collectives of a group.
  struct Recent {
    uint64_t number = 0;  // among the group's collectives
    const char* op = "";
    std::thread::id thread;
    int64_t created = 0;  // time of its issue, in ns since the epoch
    Stack stack;          // Python's, or null
  };
  // Returns the latest collectives of this process's rank `rank`, a global one, in the group, the
  // oldest first. If several groups have had this name, the latest one's.
  std::vector<Recent> recent(const std::string& group, int64_t rank) const;

  struct What {
    bool entries = true;
    bool completed = true;  // include entries of completed operations
    bool stacks = true;     // include stacks in a pickle; pickle() then takes the GIL
    bool threads = false;   // with `stacks`, include where Python's threads are now
  };
  std::string json(What what) const;
  // Returns a dump that torchfrtrace reads.
  std::string pickle(What what) const;

  struct State;

 private:
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg
