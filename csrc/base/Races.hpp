// Marks of the branches that only a race reaches. The one test that shows why a branch exists fails
// if it does not reach the mark. Independent of torch.
#pragma once

#ifdef TORCHCOMMS_PG_COUNT_RACES  // in the native tests
#include <array>
#include <atomic>
#endif

namespace torchcomms_pg::races {

// What has happened between two steps.
enum class Race {
  departedAfterItsPart,       // a rank has done its part, and has left before this rank looked
  leaderVanished,             // the rank that led a diagnosis writes no verdict
  leaderWasStopped,           // this rank led a diagnosis, and was stopped for too long
  anotherVerdictWasFirst,     // this rank led a diagnosis, and another one has ended the round
  answersOfDifferentTimes,    // ranks have arrived one after another, while they were asked
  verdictEndedBeforeItsRead,  // the operation has ended before this rank read the verdict
  gilChangedHands,            // the holder of the GIL went on while its stacks were being read
  kCount,
};

#ifdef TORCHCOMMS_PG_COUNT_RACES
inline std::array<std::atomic<int>, static_cast<size_t>(Race::kCount)> counts;
inline void mark(Race race) {
  ++counts[static_cast<size_t>(race)];
}
// Returns how often this process has passed the mark.
inline int passed(Race race) {
  return counts[static_cast<size_t>(race)];
}
#else
inline void mark(Race /*race*/) {}
#endif

}  // namespace torchcomms_pg::races
