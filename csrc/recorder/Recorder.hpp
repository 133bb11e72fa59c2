// A ring of the latest operations, in the schema of c10d's flight recorder.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recorder/Stack.hpp"

namespace torchcomms_pg {

// Thread-safe. Groups are added, then their operations: each becomes an entry
// when it is issued, which is told when the operation starts and when it ends.
// When the ring is full, a new entry takes the place of the oldest.
//
// A message is recorded in a group of its own two ranks, "<group>:<rank>-<rank>",
// as if it had a communicator of its own: torch's analyser expects every rank
// of a group in each of its entries.
class Recorder {
 public:
  // 0 entries: records nothing.
  Recorder(size_t maxEntries, bool cppStacks);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  using GroupId = size_t;

  // `ranks`: the global ones of the group's ranks, of which this is `rank`.
  GroupId addGroup(
      const std::string& name,
      const std::string& description,
      const std::vector<int64_t>& ranks,
      int rank);

  enum class Direction : uint8_t { none, send, receive };

  // An operation that is issued.
  struct Issue {
    const char* op = "";  // as c10d calls it, e.g. "_all_gather_base"
    uint64_t seq = 0;     // counts the collectives of the group, or its messages, from 1
    const std::vector<at::Tensor>& inputs;
    const std::vector<at::Tensor>& outputs;
    bool join = false;  // several tensors are recorded as the one they are parts of
    std::chrono::milliseconds timeout{0};
    Direction direction = Direction::none;  // of a message
    int peer = -1;                          // of a message; -1: whoever sends first
    bool started = false;
  };

  // Where an entry is, as long as no later one takes its place.
  struct Place {
    size_t slot = 0;
    size_t id = 0;
    size_t epoch = 0;
  };

  // `stack`: Python's. The recorder adds that of C++ itself, if `cppStacks`.
  Place add(GroupId group, const Issue& issue, Stack stack);
  void start(GroupId group, const Place& place);
  // `completed` false: it failed. `source`: whom a message came from, if known.
  void end(
      GroupId group,
      const Place& place,
      bool completed,
      std::optional<float> milliseconds,
      int source = -1);

  bool enabled() const;
  size_t size() const;
  // Forgets the entries, not the groups.
  void reset();

  // Of this process in the first group, for the name of its file; -1: none was added.
  int rank() const;

  struct What {
    bool entries = true;
    bool completed = true;  // also entries of completed operations
    bool stacks = true;     // in a pickle; takes the GIL
  };
  std::string json(What what) const;
  // What torchfrtrace reads.
  std::string pickle(What what) const;

  struct State;

 private:
  const std::unique_ptr<State> state_;
};

}  // namespace torchcomms_pg
