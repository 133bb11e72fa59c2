// Says which rank of a group takes longer than the others, so that they wait for it. Knows nothing
// of torch, and of no clock but the ranks' own.
//
// Between two collectives a rank does something of its own, and waits for others. Ranks of a group
// pass its collectives together, so that who does more of its own has the others wait for it by as
// much. Own times are differences of one clock: clocks of two hosts are not compared.
//
// The collectives are cut into blocks. Of each two ranks the difference of own times is taken in
// every block, and of these the median, since a stall or a checkpoint is in few of them: this is
// the median of means (Nemirovsky and Yudin 1983; Lugosi and Mendelson, "Mean Estimation and
// Regression under Heavy-Tailed Distributions", 2019), of pairs. Its scatter is the median absolute
// deviation from it (Hampel, "The Influence Curve and Its Role in Robust Estimation", 1974).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "monitor/Arrivals.hpp"

namespace torchcomms_pg {

struct RankLateness {
  double later = 0;  // seconds that it comes later to a collective than the median of the others
  double share = 0;  // part of the time for which all others wait for it alone

  static void fields(auto& self, auto& visit) { visit(self.later, self.share); }
};

struct Lateness {
  std::vector<RankLateness> ranks;  // empty: not enough is known
  uint64_t collectives = 0;         // number of those looked at
  double seconds = 0;               // time of them
  // The rank for which the others wait for more than kLateShare of the time, beyond doubt.
  std::optional<int> late;

  static void fields(auto& self, auto& visit) {
    visit(self.ranks, self.collectives, self.seconds, self.late);
  }
};

inline constexpr double kLateShare = 0.1;

// Limits of doubt. Blocks: there are at least so many. Of them the rank is later than every other
// in this part. Deviations: what it is named for is so many times the scatter between blocks; of 16
// normal ones with no difference the median comes to that by 7 times its standard error.
inline constexpr size_t kFewestBlocks = 16;
inline constexpr double kSteadyPart = 0.875;
inline constexpr double kDeviations = 3;

// Judges what the ranks, by number, tell of their arrivals.
Lateness judgeLateness(const std::vector<Arrivals>& ranks);

}  // namespace torchcomms_pg
