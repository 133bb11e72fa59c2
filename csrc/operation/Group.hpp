// A group's names and ranks, for messages and records.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torchcomms_pg {

struct Group {
  std::string name;
  std::string description;
  std::string backend;               // the backend's name in c10d; empty for a TorchComm
  std::vector<int64_t> globalRanks;  // by rank; empty if they equal the group's ranks
  std::vector<std::string> hosts;    // by rank; empty if all ranks are on one host
  int globalRankStart = 0;
  int globalRankStride = 1;

  // Returns whether this group replaces a group of torch's Gloo, in a program that was written for
  // Gloo. The group's texts are then Gloo's, and its sends end when the message has been received.
  bool standsForGloo() const { return backend == "gloo"; }

  // Return the names of ranks for texts, such as "rank 1", "ranks 1, 2", "rank 3 on host1", or
  // "rank 1 (global 5)" if the rank differs from the global rank.
  std::string rankName(int rank) const { return rankNames({rank}); }
  std::string rankNames(const std::vector<int>& ranks) const;
  // Returns the ranks' numbers in the default group, by rank, for a group of `size` ranks.
  std::vector<int64_t> ranks(int size) const;
  // Returns the rank's number, followed by the global rank if they differ.
  std::string numberOf(int rank) const;
};

}  // namespace torchcomms_pg
