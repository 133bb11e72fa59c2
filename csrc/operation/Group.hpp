// A group's names and ranks, for messages and records.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torchcomms_pg {

struct Group {
  std::string name;
  std::string description;
  std::string backend;               // backend's name in c10d
  std::vector<int64_t> globalRanks;  // by rank; empty if they equal the group's ranks
  std::vector<std::string> hosts;    // by rank; empty if all ranks are on one host
  int globalRankStart = 0;
  int globalRankStride = 1;

  // Returns whether the group has taken the place of one over torch's gloo, for a program that was
  // written for it. Its texts are then Gloo's, and its sends end when Gloo's would.
  bool standsForGloo() const { return backend == "gloo"; }

  // Return the names of ranks for texts, such as "rank 1", "ranks 1, 2", "rank 3 on host1", or
  // "rank 1 (global 5)" in a group whose ranks differ from the global ones.
  std::string rankName(int rank) const { return rankNames({rank}); }
  std::string rankNames(const std::vector<int>& ranks) const;
  // Returns the rank's number, followed by the global rank if they differ.
  std::string numberOf(int rank) const;
};

}  // namespace torchcomms_pg
