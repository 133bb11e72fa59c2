// Begins and ends of communicators.
#include <atomic>
#include <cstring>

#include "Ranks.hpp"

using namespace test;

namespace {

void expectWorks(ncclComm_t comm, int ranks) {
  std::vector<int> data(5, 1);
  CHECK_NCCL(
      nccl().allReduce(data.data(), data.data(), data.size(), ncclInt32, ncclSum, comm, nullptr));
  for (const int value : data) CHECK_EQUAL(value, ranks);
}

int count(ncclComm_t comm) {
  int ranks = -1;
  CHECK_NCCL(nccl().commCount(comm, &ranks));
  return ranks;
}

int userRank(ncclComm_t comm) {
  int rank = -1;
  CHECK_NCCL(nccl().commUserRank(comm, &rank));
  return rank;
}

ncclConfig_t nonBlocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

}  // namespace

TEST(theMemoryOfACommunicatorCannotBeResized) {
  ncclConfig_t config = nonBlocking();
  ncclComm_t comm = nullptr;
  CHECK_EQUAL(nccl().commInitRankConfig(&comm, 2, uniqueId(), 0, &config), ncclInProgress);
  int found = 0;
  for (int file = 0; file < 1024; ++file) {
    char target[64] = {};
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    if (readlink(path.c_str(), target, sizeof target - 1) <= 0) continue;
    if (std::string(target).find("memfd:torchcomms_pg") == std::string::npos) continue;
    ++found;
    CHECK(ftruncate(file, 0) != 0);
    CHECK(ftruncate(file, off_t{1} << 40) != 0);
  }
  CHECK_EQUAL(found, 1);
  CHECK_NCCL(nccl().commAbort(comm));
}

TEST(nonBlockingInitIsInProgressUntilAllHaveJoined) {
  const ncclUniqueId id = uniqueId();
  ncclConfig_t config = nonBlocking();
  ncclComm_t first = nullptr, second = nullptr;
  CHECK_EQUAL(nccl().commInitRankConfig(&first, 2, id, 0, &config), ncclInProgress);
  ncclResult_t async = ncclSuccess;
  CHECK_NCCL(nccl().commGetAsyncError(first, &async));
  CHECK_EQUAL(async, ncclInProgress);
  CHECK(library().missingRanks(first) == std::vector<int>{1});
  float value = 0;
  CHECK_EQUAL(
      nccl().allReduce(&value, &value, 1, ncclFloat32, ncclSum, first, nullptr),
      ncclInvalidArgument);
  CHECK_EQUAL(nccl().commInitRankConfig(&second, 2, id, 1, &config), ncclSuccess);
  CHECK_NCCL(nccl().commGetAsyncError(first, &async));
  CHECK_EQUAL(async, ncclSuccess);
  CHECK(library().missingRanks(first).empty());
  std::thread other([&] { expectWorks(second, 2); });
  expectWorks(first, 2);
  other.join();
  CHECK_NCCL(nccl().commDestroy(first));
  CHECK_NCCL(nccl().commDestroy(second));
}

TEST(aHandleIsNeverThatOfALaterCommunicator) {
  std::vector<ncclComm_t> ended;
  for (int i = 0; i < 50; ++i) {
    ended.push_back(init(uniqueId(), 1, 0));
    for (int j = 0; j < i; ++j) CHECK(ended[j] != ended[i]);
    CHECK_NCCL(nccl().commDestroy(ended.back()));
  }
}

TEST(blockedInitCanBeAborted) {
  const ncclUniqueId id = uniqueId();
  ncclComm_t comm = nullptr;
  std::thread blocked([&] {
    CHECK_EQUAL(nccl().commInitRankConfig(&comm, 2, id, 0, nullptr), ncclRemoteError);
    CHECK_CONTAINS(nccl().getLastError(nullptr), "aborted the communicator");
  });
  ncclComm_t waiting = nullptr;
  while (waiting == nullptr) waiting = std::atomic_ref(comm).load();
  CHECK(library().missingRanks(waiting) == std::vector<int>{1});
  CHECK_NCCL(nccl().commAbort(waiting));
  blocked.join();
  CHECK(comm == nullptr);
}

TEST(ranksMustAgreeOnTheirNumber) {
  const ncclUniqueId id = uniqueId();
  ncclConfig_t config = nonBlocking();
  ncclComm_t first = nullptr, second = nullptr;
  CHECK_EQUAL(nccl().commInitRankConfig(&first, 2, id, 1, &config), ncclInProgress);
  CHECK_EQUAL(nccl().commInitRankConfig(&second, 3, id, 0, nullptr), ncclInvalidArgument);
  CHECK_CONTAINS(nccl().getLastError(nullptr), "disagree on the number of ranks: 2 and 3");
  CHECK(second == nullptr);
  ncclResult_t async = ncclSuccess;
  CHECK_NCCL(nccl().commGetAsyncError(first, &async));
  CHECK_EQUAL(async, ncclInvalidArgument);
  CHECK_NCCL(nccl().commAbort(first));
}

TEST(badArgumentsOfInitAreNamed) {
  ncclComm_t comm = nullptr;
  ncclUniqueId id = uniqueId();
  const auto expect = [&](ncclResult_t result, const char* text) {
    CHECK_EQUAL(result, ncclInvalidArgument);
    CHECK_CONTAINS(nccl().getLastError(nullptr), text);
  };
  expect(nccl().commInitRankConfig(&comm, 0, id, 0, nullptr), "nranks is 0");
  expect(
      nccl().commInitRankConfig(&comm, 2, id, 2, nullptr), "rank is 2, wanted a rank from 0 to 1");
  expect(nccl().commInitRankConfig(nullptr, 2, id, 0, nullptr), "comm is null");
  ncclConfig_t config{};
  expect(nccl().commInitRankConfig(&comm, 1, id, 0, &config), "NCCL_CONFIG_INITIALIZER");
  ncclUniqueId corrupt = id;
  corrupt.internal[9] ^= 1;
  expect(nccl().commInitRankConfig(&comm, 1, corrupt, 0, nullptr), "unique id is corrupt");
  expect(nccl().commDestroy(nullptr), "commDestroy: comm is null");
  comm = init(id, 1, 0);
  CHECK_NCCL(nccl().commDestroy(comm));
  expect(nccl().commDestroy(comm), "was destroyed");
  CHECK_EQUAL(nccl().commInitRankConfig(&comm, 1, id, 0, nullptr), ncclInvalidUsage);
}

TEST(badArgumentsOfOperationsAreNamed) {
  threadRanks(1, [](ncclComm_t comm, int) {
    float value[4] = {};
    const auto expect = [&](ncclResult_t result, const char* text) {
      CHECK_EQUAL(result, ncclInvalidArgument);
      CHECK_CONTAINS(nccl().getLastError(comm), text);
    };
    const auto badType = static_cast<ncclDataType_t>(77);
    const auto badOp = static_cast<ncclRedOp_t>(99);
    expect(
        nccl().allReduce(value, value, 4, badType, ncclSum, comm, nullptr),
        "all_reduce: datatype is 77");
    expect(
        nccl().allReduce(value, value, 4, ncclFloat32, badOp, comm, nullptr),
        "all_reduce: op is 99");
    expect(
        nccl().broadcast(value, value, 4, ncclFloat32, 1, comm, nullptr),
        "broadcast: root is 1, wanted a rank from 0 to 0");
    expect(
        nccl().allGather(value, nullptr, 4, ncclFloat32, comm, nullptr),
        "all_gather: recvbuff is null");
    expect(nccl().send(value, 4, ncclFloat32, -1, comm, nullptr), "send: peer is -1");
    expect(nccl().recv(nullptr, 4, ncclFloat32, 0, comm, nullptr), "recv: recvbuff is null");
    expect(
        nccl().allReduce(value, value, SIZE_MAX / 2, ncclFloat32, ncclSum, comm, nullptr),
        "no memory can hold");
    CHECK_NCCL(nccl().allReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, comm, nullptr));
    void* handle = nullptr;
    CHECK_NCCL(nccl().commRegister(comm, value, sizeof value, &handle));
    CHECK_NCCL(nccl().commDeregister(comm, handle));
    expect(nccl().commDeregister(comm, handle), "commDeregister");
    void* memory = nullptr;
    CHECK_NCCL(nccl().memAlloc(&memory, 10'000));
    CHECK_EQUAL(reinterpret_cast<uintptr_t>(memory) % 4096, 0u);
    std::memset(memory, 1, 10'000);
    CHECK_NCCL(nccl().memFree(memory));
    CHECK_EQUAL(nccl().memFree(memory), ncclInvalidArgument);
  });
}

TEST(aRankJoinsOnce) {
  const ncclUniqueId id = uniqueId();
  ncclConfig_t config = nonBlocking();
  ncclComm_t comm = nullptr, again = nullptr;
  CHECK_EQUAL(nccl().commInitRankConfig(&comm, 2, id, 0, &config), ncclInProgress);
  CHECK_EQUAL(nccl().commInitRankConfig(&again, 2, id, 0, &config), ncclInvalidUsage);
  CHECK_CONTAINS(
      nccl().getLastError(nullptr),
      "rank 0 has already joined (pid " + std::to_string(getpid()) + ")");
  CHECK_NCCL(nccl().commAbort(comm));
}

TEST(idOfAnEndedProcessIsRefused) {
  int ids[2];
  CHECK(pipe(ids) == 0);
  Processes maker;
  maker.start([&] {
    const ncclUniqueId id = uniqueId();
    CHECK(write(ids[1], &id, sizeof id) == sizeof id);
  });
  maker.joinAll();
  ncclUniqueId id;
  CHECK(read(ids[0], &id, sizeof id) == sizeof id);
  ncclComm_t comm = nullptr;
  CHECK_EQUAL(nccl().commInitRankConfig(&comm, 2, id, 0, nullptr), ncclRemoteError);
  CHECK_CONTAINS(nccl().getLastError(nullptr), "has ended: pid ");
}

TEST(splitGroupsByColorAndOrdersByKey) {
  processRanks(4, [](ncclComm_t comm, int rank) {
    ncclComm_t part = nullptr;
    // Ranks 0, 1, 2 in reverse order; rank 3 in none.
    CHECK_NCCL(nccl().commSplit(comm, rank == 3 ? NCCL_SPLIT_NOCOLOR : 7, -rank, &part, nullptr));
    if (rank == 3) {
      CHECK(part == nullptr);
    } else {
      CHECK_EQUAL(count(part), 3);
      CHECK_EQUAL(userRank(part), 2 - rank);
      expectWorks(part, 3);
      CHECK_NCCL(nccl().commDestroy(part));
    }
    expectWorks(comm, 4);
    CHECK_EQUAL(nccl().commSplit(comm, -5, 0, &part, nullptr), ncclInvalidArgument);
  });
}

TEST(shrinkLeavesOutADeadRank) {
  const ncclUniqueId id = uniqueId();
  Processes processes;
  int ready[2];
  CHECK(pipe(ready) == 0);
  for (int rank = 0; rank < 4; ++rank) {
    processes.start([&, rank] {
      const ncclComm_t comm = init(id, 4, rank);
      expectWorks(comm, 4);
      CHECK(write(ready[1], "x", 1) == 1);
      std::vector<float> data(10);
      // Rank 3 finds out by itself; the others shrink without having failed.
      if (rank == 1) pause();
      if (rank == 3) {
        CHECK_EQUAL(
            nccl().allReduce(data.data(), data.data(), 10, ncclFloat32, ncclSum, comm, nullptr),
            ncclRemoteError);
      }
      int excluded[] = {1};
      ncclComm_t rest = nullptr;
      CHECK_NCCL(nccl().commShrink(comm, excluded, 1, &rest, nullptr, NCCL_SHRINK_ABORT));
      CHECK_EQUAL(count(rest), 3);
      CHECK_EQUAL(userRank(rest), rank == 0 ? 0 : rank - 1);
      expectWorks(rest, 3);
      // And once more, from the shrunk one, which is healthy.
      if (rank != 3) {
        int last[] = {2};
        ncclComm_t two = nullptr;
        CHECK_NCCL(nccl().commShrink(rest, last, 1, &two, nullptr, NCCL_SHRINK_DEFAULT));
        CHECK_EQUAL(count(two), 2);
        expectWorks(two, 2);
        CHECK_NCCL(nccl().commDestroy(two));
      }
      CHECK_NCCL(nccl().commDestroy(rest));
      CHECK_NCCL(nccl().commDestroy(comm));
    });
  }
  char ignored;
  for (int i = 0; i < 4; ++i) CHECK(read(ready[0], &ignored, 1) == 1);
  processes.kill(1);
  for (const int rank : {0, 2, 3}) processes.join(rank);
}

TEST(finalizedCommunicatorsRefuseOperations) {
  threadRanks(2, [](ncclComm_t comm, int) {
    expectWorks(comm, 2);
    CHECK_NCCL(nccl().commFinalize(comm));
    float value = 0;
    CHECK_EQUAL(
        nccl().allReduce(&value, &value, 1, ncclFloat32, ncclSum, comm, nullptr), ncclInvalidUsage);
    CHECK_EQUAL(nccl().commFinalize(comm), ncclInvalidArgument);
  });
}

TEST(manyCommunicatorsLeaveNothingBehind) {
  CHECK_EQUAL(mappedSegments(), 0);
  const int files = descriptors();
  for (int round = 0; round < 30; ++round) {
    std::vector<ncclUniqueId> ids;
    for (int i = 0; i < 10; ++i) ids.push_back(uniqueId());
    threads(2, [&](int rank) {
      std::vector<ncclComm_t> comms;
      for (const ncclUniqueId& id : ids) comms.push_back(init(id, 2, rank));
      for (const ncclComm_t comm : comms) expectWorks(comm, 2);
      for (const ncclComm_t comm : comms) CHECK_NCCL(nccl().commDestroy(comm));
    });
  }
  CHECK_EQUAL(descriptors(), files);
  CHECK_EQUAL(mappedSegments(), 0);
}

TEST(versionAndTexts) {
  int version = 0;
  CHECK_NCCL(nccl().getVersion(&version));
  CHECK_EQUAL(version, NCCL_VERSION_CODE);
  for (int code = 0; code <= 9; ++code)
    CHECK(nccl().getErrorString(static_cast<ncclResult_t>(code)) != nullptr);
}
