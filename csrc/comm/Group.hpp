// Who takes part, for messages and records.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torchcomms_pg {

struct Group {
  std::string name;
  std::string description;
  std::string backend;               // by which name c10d has it
  std::vector<int64_t> globalRanks;  // of the group's ranks; empty: the same numbers
  std::vector<std::string> hosts;    // by rank; empty: all are on one
  int globalRankStart = 0;
  int globalRankStride = 1;
};

}  // namespace torchcomms_pg
