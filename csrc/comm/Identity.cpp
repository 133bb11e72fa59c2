#include "comm/Identity.hpp"

namespace torchcomms_pg {

std::vector<int64_t> Identity::globalRanks() const {
  auto ranks = group_.globalRanks;
  for (int rank = static_cast<int>(ranks.size()); rank < size_; ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

std::vector<int> Identity::members() const {
  auto ranks = pair();
  for (int rank = 0; pair().empty() && rank < size_; ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace torchcomms_pg
