// Which ranks have arrived at init_process_group. The ranks have no group yet in which they could
// ask.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "base/Mutex.hpp"
#include "diagnosis/store/JobStore.hpp"

namespace torchcomms_pg {

// Where the ranks meet: at the server of their store.
struct MeetingPlace {
  std::string host;
  uint16_t port = 0;
  std::string key;  // of this meeting in the store
};

// A rank's entry in the list of those that have arrived, which the store's server keeps. Each
// method but the constructor blocks, for some seconds at most, and raises c10::DistStoreError if no
// process serves the store. Thread-safe.
class Meeting {
 public:
  Meeting(MeetingPlace place, int64_t rank);

  // Adds this rank to the list, once.
  void come();
  // Ends this rank's part: come() has no effect any more. Removes the rank from the list, unless it
  // has joined the others: a slower rank must not miss it.
  void leave(bool joined);
  // Returns the ranks on the list. Some of them may have died since.
  std::set<int64_t> ranks();

  std::string address() const { return store_->address(); }
  // Returns the number under which the processes that meet find each other in the status.
  uint64_t id() const;

 private:
  void append(char what) REQUIRES(mutex_);

  const MeetingPlace place_;
  const int64_t rank_;
  const std::shared_ptr<JobStore> store_;
  Mutex mutex_;
  bool listed_ GUARDED_BY(mutex_) = false;
  bool left_ GUARDED_BY(mutex_) = false;
};

}  // namespace torchcomms_pg
