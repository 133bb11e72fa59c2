// Rings the ranks of a job through its store, which is all that backends of others have in common.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>

#include "monitor/HangDiagnosis.hpp"

namespace torchcomms_pg {

// The bell of the groups that share a store. One thread of the process rings there, and looks once
// a second whether another rank has, until the last group is gone, or the store. Thread-safe.
class Bell {
 public:
  // Returns the one of the store, whatever prefixes that has. To be held by groups alone, which
  // keep the store: a program may want the port of one whose groups are destroyed. Raises
  // std::runtime_error if no thread can be started.
  static std::shared_ptr<Bell> of(const c10::intrusive_ptr<c10d::Store>& store);

  explicit Bell(c10::intrusive_ptr<c10d::Store> store);  // for of()
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  // Notifies `diagnosis`, as long as it lives, when another rank rings for `group`.
  void listen(uint64_t group, const std::shared_ptr<HangDiagnosis>& diagnosis);

  // Rings for the group, soon.
  void ring(uint64_t group);

 private:
  struct State;
  const std::shared_ptr<State>
      state_;  // shared with the thread, which may be in the store for long
};

}  // namespace torchcomms_pg
