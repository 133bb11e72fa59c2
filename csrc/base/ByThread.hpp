// State that goes with a thread.
#pragma once

#include <map>
#include <memory>

namespace torchcomms_pg {

// Reference to a thread that expires with it. The id of a thread that has ended may be that of the
// next one; this is never that of another, as std::owner_less compares it.
using ThreadLife = std::weak_ptr<const void>;

// Returns the life of the calling thread.
inline const std::shared_ptr<const void>& threadLife() {
  thread_local const std::shared_ptr<const void> life = std::make_shared<char>();
  return life;
}

// Entries of threads, each found by threadLife(). Those of threads that have ended stay until
// somebody takes them out.
template <class Entry>
using ByThread = std::map<ThreadLife, Entry, std::owner_less<>>;

}  // namespace torchcomms_pg
