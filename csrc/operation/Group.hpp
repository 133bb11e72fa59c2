// A group's names and ranks, for messages and records.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torchcomms_pg {

struct Group {
  std::string name;
  std::string description;
  std::string backend;               // name by which c10d knows it
  std::vector<int64_t> globalRanks;  // by rank; empty: the same numbers
  std::vector<std::string> hosts;    // by rank; empty: all are on one
  int globalRankStart = 0;
  int globalRankStride = 1;
};

}  // namespace torchcomms_pg
