// One operation's entries in the recorders of its communicator.
#pragma once

#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>

#include "comm/Operation.hpp"
#include "recorder/Recorder.hpp"

namespace torchcomms_pg {

// A group in a recorder.
struct Recorded {
  std::shared_ptr<Recorder> recorder;
  Recorder::GroupId group = 0;
};

class Recording {
 public:
  // Shares one stack among the recorders.
  void add(const Recorded& recorded, const Recorder::Issue& issue, const Stack& stack) {
    entries_.push_back({recorded, recorded.recorder->add(recorded.group, issue, stack)});
    stack_ = stack;
  }

  // Of the thread that issued the operation.
  const Stack& stack() const { return stack_; }

  void start() const {
    for (const auto& [in, place] : entries_) {
      in.recorder->start(in.group, place);
    }
  }

  // `source`: whom a message came from; -1: not known, or several.
  void end(bool completed, Clock::duration duration, int source) const {
    const auto milliseconds = std::chrono::duration<float, std::milli>(duration).count();
    for (const auto& [in, place] : entries_) {
      in.recorder->end(in.group, place, completed, milliseconds, source);
    }
  }

 private:
  struct Entry {
    Recorded in;
    Recorder::Place place;
  };
  c10::SmallVector<Entry, 1> entries_;
  Stack stack_;
};

}  // namespace torchcomms_pg
