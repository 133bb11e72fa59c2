// Maps with a value for each thread.
#pragma once

#include <map>
#include <memory>

namespace torchcomms_pg {

// Identifies a thread and expires when that thread ends. The system reuses the ids of ended
// threads; std::owner_less tells the lives of any two threads apart.
using ThreadLife = std::weak_ptr<const void>;

// Returns the life of the calling thread.
inline const std::shared_ptr<const void>& threadLife() {
  thread_local const std::shared_ptr<const void> life = std::make_shared<char>();
  return life;
}

// Map with one entry per thread, keyed by threadLife(). The entry of an ended thread stays until
// the owner of the map erases it.
template <class Entry>
using ByThread = std::map<ThreadLife, Entry, std::owner_less<>>;

}  // namespace torchcomms_pg
