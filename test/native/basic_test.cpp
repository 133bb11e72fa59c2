#include "Ranks.hpp"

using namespace test;

namespace {

void sumOfRanks(ncclComm_t comm, int rank) {
  int ranks = 0;
  CHECK_NCCL(nccl().commCount(comm, &ranks));
  for (size_t count : {1, 1000, 100'000, 1'000'000}) {
    std::vector<float> data(count, static_cast<float>(rank + 1));
    CHECK_NCCL(
        nccl().allReduce(data.data(), data.data(), count, ncclFloat32, ncclSum, comm, nullptr));
    for (const float value : data) CHECK_EQUAL(value, ranks * (ranks + 1) / 2.0f);
  }
}

}  // namespace

TEST(threadsOfOneProcessReduce) {
  for (int ranks = 1; ranks <= 4; ++ranks) threadRanks(ranks, sumOfRanks);
}

TEST(processesReduce) {
  for (int ranks = 1; ranks <= 4; ++ranks) processRanks(ranks, sumOfRanks);
}
