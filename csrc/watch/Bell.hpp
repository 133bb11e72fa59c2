// Notifies the ranks of a job through its store, the only channel that groups of foreign backends
// share.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>

#include "monitor/HangDiagnosis.hpp"

namespace torchcomms_pg {

// The bell of the groups that share a store. One thread of this process rings in the store, and
// checks once a second whether another rank has rung, until the last group or the store is gone.
// Thread-safe.
class Bell {
 public:
  // Returns the store's bell, whatever prefixes `store` adds. Only groups may hold it, since it
  // keeps the store: a program may need the store's port again when its groups are destroyed.
  // Raises std::runtime_error if no thread can be started.
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
  const std::shared_ptr<State> state_;  // shared with the thread, which may block long in the store
};

}  // namespace torchcomms_pg
