// One operation's entries in the recorders of its communicator.
#pragma once

#include <c10/util/SmallVector.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "recorder/FlightRecorder.hpp"

namespace torchcomms_pg {

// A group in a recorder.
struct RecorderGroup {
  std::shared_ptr<FlightRecorder> recorder;
  FlightRecorder::Group* group = nullptr;
};

class RecordedOp {
 public:
  using Recorders = std::shared_ptr<const std::vector<RecorderGroup>>;

  // Starts without entries. `stack`: Python's stack in the thread that issues the operation.
  RecordedOp(Recorders recorders, Stack stack)
      : recorders_(std::move(recorders)), stack_(std::move(stack)) {
    for (const auto& [recorder, group] : *recorders_) {
      cppStacks_ |= recorder->cppStacks();
    }
  }

  void add(const OpRecord::Issue& issue) {
    auto& [record, places] = entries_.emplace_back();
    record = std::make_shared<OpRecord>(issue, stack_, cppStacks_);
    for (const auto& [recorder, group] : *recorders_) {
      places.push_back(recorder->add(*group, record));
    }
  }

  const Stack& stack() const { return stack_; }

  void start() const {
    for (const auto& entry : entries_) {
      if (entry.record->start()) {
        for (const auto& [recorder, group] : *recorders_) {
          recorder->start(*group, *entry.record);
        }
      }
    }
  }

  // Ends the entries. `source`: the sender of a message, or -1 if it is unknown or there are
  // several.
  void end(bool completed, std::chrono::steady_clock::duration duration, int source) const {
    const auto milliseconds = std::chrono::duration<float, std::milli>(duration).count();
    for (const auto& [record, places] : entries_) {
      record->end(completed, milliseconds);
      for (size_t i = 0; completed && i < places.size(); ++i) {
        const auto& [recorder, group] = (*recorders_)[i];
        recorder->complete(*group, *record, places[i], source);
      }
    }
  }

 private:
  struct Entry {
    std::shared_ptr<OpRecord> record;
    c10::SmallVector<size_t, 2> places;  // places of the entry, by recorder
  };
  const Recorders recorders_;
  const Stack stack_;
  bool cppStacks_ = false;
  c10::SmallVector<Entry, 1> entries_;
};

}  // namespace torchcomms_pg
