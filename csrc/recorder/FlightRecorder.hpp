// A ring buffer of the latest operations, in the schema of c10d's flight recorder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "recorder/OpRecord.hpp"

namespace torchcomms_pg {

// Records the operations of groups. Each operation becomes an entry when it is issued; start() and
// complete() report its progress. If the ring is full, a new entry replaces the oldest.
// Thread-safe.
//
// A message is recorded in a group of its two ranks, "<group>:<rank>-<rank>", as if the pair had
// its own communicator: torch's analyser expects every rank of a group in each of its entries. For
// the same reason, and since the schema has no names for them, operations on a peer's memory are
// recorded in a group of the calling rank, "<group>:put <rank>-><rank>".
class FlightRecorder {
 public:
  // Makes a recorder of the latest `maxEntries` operations; with 0 it records nothing.
  FlightRecorder(size_t maxEntries, bool cppStacks);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  struct Group;

  // Adds a group, which the recorder owns. `ranks` are the global ranks of the group's ranks;
  // `rank` is this rank in the group.
  Group* addGroup(
      const std::string& name,
      const std::string& description,
      const std::vector<int64_t>& ranks,
      int rank);

  // Sets the version of the library that executes the operations, for the head of dumps.
  void setLibraryVersion(const std::string& version);

  // Adds an entry and returns its place, which a later entry may take over.
  size_t add(Group& group, std::shared_ptr<const OpRecord> record);
  void start(Group& group, const OpRecord& record);
  // Counts an operation that a graph has captured. Neither it nor its replays get an entry.
  void noteCaptured();
  // Records that the operation has completed. `source` is the sender of a message, or -1 if
  // unknown.
  void complete(Group& group, const OpRecord& record, size_t place, int source);

  bool cppStacks() const;
  bool enabled() const;
  size_t size() const;
  // Drops the entries but keeps the groups.
  void reset();

  // Returns the global rank of this process in the first group, for the file's name, or -1 without
  // a group.
  int rank() const;

  struct What {
    bool entries = true;
    bool completed = true;  // include entries of completed operations
    bool stacks = true;     // include stacks in a pickle, which takes the GIL
  };
  std::string json(What what) const;
  // Returns a dump that torchfrtrace reads.
  std::string pickle(What what) const;

  struct State;

 private:
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg
