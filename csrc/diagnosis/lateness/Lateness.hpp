// Finds a rank that works longer than the other ranks of its group, which wait for it. Independent
// of torch.
//
// Between two collectives a rank does its own work, and waits for other ranks. The ranks of a group
// pass its collectives together, so the others wait for a rank with more work. A rank's own time is
// the time between two collectives without its waits, measured by its own clock: clocks of two
// ranks are never compared.
//
// The collectives are grouped into blocks. In every block, the own time of the latest rank is
// compared with each other rank's. The median of the differences over the blocks counts, since only
// few blocks have a stall or a checkpoint. This is the median of means (Nemirovsky and Yudin 1983;
// Lugosi and Mendelson, "Mean Estimation and Regression under Heavy-Tailed Distributions", 2019).
// The differences' scatter is measured by the median absolute deviation (Hampel, "The Influence
// Curve and Its Role in Robust Estimation", 1974).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "diagnosis/lateness/Arrivals.hpp"

namespace torchcomms_pg {

struct RankLateness {
  double later = 0;  // seconds per collective by which it works longer than the others' median
  double share = 0;  // part of the time in which all others wait for it alone; 0 unless the latest

  static void fields(auto& self, auto& visit) { visit(self.later, self.share); }
};

struct Lateness {
  std::vector<RankLateness> ranks;  // empty if too little is known
  uint64_t collectives = 0;         // number of judged collectives
  double seconds = 0;               // time that the collectives span
  // The rank for which the others wait more than kLateShare of the time; nullopt if no rank meets
  // the conditions below.
  std::optional<int> late;

  static void fields(auto& self, auto& visit) {
    visit(self.ranks, self.collectives, self.seconds, self.late);
  }
};

inline constexpr double kLateShare = 0.1;

// Conditions for naming a rank. There are at least kFewestBlocks blocks. The rank is later than
// each other rank in at least kSteadyPart of them. Its share is at least kDeviations times the
// scatter between blocks. For 16 normally distributed blocks of ranks that do not differ, the
// median reaches that multiple of the scatter only at 7 times its standard error.
inline constexpr size_t kFewestBlocks = 16;
inline constexpr double kSteadyPart = 0.875;
inline constexpr double kDeviations = 3;

// Returns the interval at which a rank publishes its arrivals in each of its `groups` groups, if
// its largest one has `ranks` ranks. One process serves the store for all of them. In one interval
// each rank writes once for each of its groups, and each group's rank 0 reads that once: so the
// store gets at most 160 requests a second of a job whose ranks have equally many groups.
inline std::chrono::milliseconds publicationInterval(int64_t ranks, int64_t groups) {
  constexpr std::chrono::milliseconds kUsualInterval{2000};
  constexpr int64_t kUsualPublications = 160;
  return kUsualInterval * std::max(ranks * groups, kUsualPublications) / kUsualPublications;
}

// Judges the ranks' reports, which are in the order of ranks, by the rule above.
Lateness judgeLateness(const std::vector<Arrivals>& ranks);

}  // namespace torchcomms_pg
