// A ring buffer of the latest operations, in the schema of c10d's flight recorder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "recorder/OpRecord.hpp"

namespace torchcomms_pg {

// Records operations. Groups are added, then their operations: each becomes an entry when it is
// issued, which is told when the operation starts and when it ends. When the ring is full, a new
// entry takes the place of the oldest. Thread-safe.
//
// A message is recorded in a group of its own two ranks, "<group>:<rank>-<rank>", as if it had a
// communicator of its own: torch's analyser expects every rank of a group in each of its entries.
// For the same reason, and since the schema has no names for them, operations on the memory of a
// peer are in a group of the rank that calls them, "<group>:put <rank>-><rank>".
class FlightRecorder {
 public:
  // Makes a recorder of the latest `maxEntries`; 0: records nothing.
  FlightRecorder(size_t maxEntries, bool cppStacks);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  struct Group;

  // Adds a group, which the recorder keeps. `ranks`: the global ones of the group's ranks, of which
  // this is `rank`.
  Group* addGroup(
      const std::string& name,
      const std::string& description,
      const std::vector<int64_t>& ranks,
      int rank);

  // Sets the version of the library that the operations go through, for the head of dumps.
  void setLibraryVersion(const std::string& version);

  // Adds an entry and returns its place, which is its own until a later one takes it.
  size_t add(Group& group, std::shared_ptr<const OpRecord> record);
  void start(Group& group, const OpRecord& record);
  // Counts an operation that a graph has captured: it has no entry, nor have its replays.
  void noteCaptured();
  // Notes that the operation has completed. `source`: the sender of a message; -1: not known.
  void complete(Group& group, const OpRecord& record, size_t place, int source);

  bool cppStacks() const;
  bool enabled() const;
  size_t size() const;
  // Drops the entries, not the groups.
  void reset();

  // Returns the global rank of this process in the first group, for the name of its file; -1: none
  // was added.
  int rank() const;

  struct What {
    bool entries = true;
    bool completed = true;  // includes entries of completed operations
    bool stacks = true;     // includes stacks, in a pickle; takes the GIL
  };
  std::string json(What what) const;
  // Returns a dump that torchfrtrace reads.
  std::string pickle(What what) const;

  struct State;

 private:
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg
