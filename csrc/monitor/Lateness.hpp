// Finds a rank that takes longer than the others of its group, so that they wait for it.
// Independent of torch, and of all clocks but the ranks' own.
//
// Between two collectives a rank does its own work, and waits for others. The ranks of a group pass
// its collectives together, so a rank with more work makes the others wait by as much. Own times
// are differences on one clock; clocks of two hosts are never compared.
//
// The collectives are cut into blocks. For each two ranks, the difference of own times is taken in
// every block, and then the median of these differences, since a stall or a checkpoint is in few
// blocks. This is the median of means (Nemirovsky and Yudin 1983; Lugosi and Mendelson, "Mean
// Estimation and Regression under Heavy-Tailed Distributions", 2019), applied to the differences of
// two ranks. The measure of its scatter is the median absolute deviation (Hampel, "The Influence
// Curve and Its Role in Robust Estimation", 1974).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "monitor/Arrivals.hpp"

namespace torchcomms_pg {

struct RankLateness {
  double later = 0;  // seconds, per collective, that it arrives after the median of the others
  double share = 0;  // part of the time in which all others wait for it alone

  static void fields(auto& self, auto& visit) { visit(self.later, self.share); }
};

struct Lateness {
  std::vector<RankLateness> ranks;  // empty if too little is known
  uint64_t collectives = 0;         // number of collectives judged
  double seconds = 0;               // time that they span
  // The rank for which the others wait more than kLateShare of the time, if that is beyond doubt.
  std::optional<int> late;

  static void fields(auto& self, auto& visit) {
    visit(self.ranks, self.collectives, self.seconds, self.late);
  }
};

inline constexpr double kLateShare = 0.1;

// Conditions for naming a rank. kFewestBlocks: there are at least that many blocks. kSteadyPart: in
// this part of them the rank is later than each other one. kDeviations: its share is that many
// times the scatter between blocks. Of 16 normally distributed blocks without a difference, the
// median reaches that only at 7 times its standard error.
inline constexpr size_t kFewestBlocks = 16;
inline constexpr double kSteadyPart = 0.875;
inline constexpr double kDeviations = 3;

// Judges the ranks' reports, which are in the order of ranks.
Lateness judgeLateness(const std::vector<Arrivals>& ranks);

}  // namespace torchcomms_pg
