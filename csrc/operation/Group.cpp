#include "operation/Group.hpp"

#include "operation/Operation.hpp"

namespace torchcomms_pg {

std::string Group::rankNames(const std::vector<int>& ranks) const {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  if (hosts.empty()) {
    names += joinRanks(ranks);
  } else {
    for (const int rank : ranks) {
      names += (rank == ranks.front() ? "" : ", ") + std::to_string(rank) + " on " + hosts[rank];
    }
  }
  bool same = true;
  std::vector<int> global;
  for (const int rank : ranks) {
    if (static_cast<size_t>(rank) < globalRanks.size()) {
      global.push_back(static_cast<int>(globalRanks[rank]));
      same &= global.back() == rank;
    }
  }
  return same ? names : names + " (global " + joinRanks(global) + ")";
}

std::vector<int64_t> Group::ranks(int size) const {
  auto ranks = globalRanks;
  for (auto rank = static_cast<int64_t>(ranks.size()); rank < size; ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

std::string Group::numberOf(int rank) const {
  const bool known = static_cast<size_t>(rank) < globalRanks.size();
  return std::to_string(rank) + (known && globalRanks[rank] != rank
                                     ? " (global " + std::to_string(globalRanks[rank]) + ")"
                                     : "");
}

}  // namespace torchcomms_pg
