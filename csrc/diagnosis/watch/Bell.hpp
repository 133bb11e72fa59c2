// Notifies the ranks of a job through its store, the only channel that groups of all backends have.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>

#include "diagnosis/hang/HangDiagnosis.hpp"

namespace torchcomms_pg {

// This process's bell for the groups of one store. Its thread writes this process's rings into the
// store, and once a second reads all ranks' rings there, until the last group or the store is gone.
// Thread-safe.
class Bell {
 public:
  // Returns the store's bell, whatever prefixes `store` adds. Only groups may hold the bell, since
  // it keeps the store: a program may need the store's port again when its groups are destroyed.
  // Raises std::runtime_error if no thread can be started.
  static std::shared_ptr<Bell> of(const c10::intrusive_ptr<c10d::Store>& store);

  explicit Bell(c10::intrusive_ptr<c10d::Store> store);  // for of()
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  // Notifies `diagnosis`, while it exists, whenever a rank rings for `group`, including this rank.
  void listen(uint64_t group, const std::shared_ptr<HangDiagnosis>& diagnosis);

  // Makes the bell's thread ring for the group soon.
  void ring(uint64_t group);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the thread, which may block long in the store
};

}  // namespace torchcomms_pg
