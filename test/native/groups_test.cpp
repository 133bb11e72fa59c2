// Streams and groups behave as NCCL's do.
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "Ranks.hpp"
#include "Streams.hpp"

using namespace test;

namespace {

ncclResult_t sum(std::vector<float>& data, ncclComm_t comm, cudaStream_t stream) {
  return nccl().allReduce(
      data.data(), data.data(), data.size(), ncclFloat32, ncclSum, comm, stream);
}

void expectAll(const std::vector<float>& data, float wanted) {
  for (const float value : data) CHECK_EQUAL(value, wanted);
}

}  // namespace

TEST(callsOnAStreamReturnAtOnce) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    Stream stream;
    std::vector<float> data(1000, 1), peerToken(1, 1);
    if (rank == 0) {
      CHECK_NCCL(sum(data, comm, stream.handle()));  // rank 1 has not been asked to arrive yet
      CHECK_NCCL(nccl().send(peerToken.data(), 1, ncclFloat32, 1, comm, nullptr));
    } else {
      CHECK_NCCL(nccl().recv(peerToken.data(), 1, ncclFloat32, 0, comm, nullptr));
      CHECK_NCCL(sum(data, comm, stream.handle()));
    }
    stream.synchronize();
    expectAll(data, 2);
  });
}

TEST(peersOfASmallCollectiveDoNotWaitForItsStream) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    LaterStream stream;
    std::vector<float> data(1000, 1), token(1);
    if (rank == 0) {
      CHECK_NCCL(sum(data, comm, stream.handle()));
      CHECK(library().published(comm));
      CHECK_NCCL(nccl().recv(token.data(), 1, ncclFloat32, 1, comm, nullptr));
      expectAll(data, 1);
      stream.run();
      CHECK(!library().published(comm));
    } else {
      CHECK_NCCL(sum(data, comm, nullptr));
      CHECK_NCCL(nccl().send(token.data(), 1, ncclFloat32, 0, comm, nullptr));
    }
    expectAll(data, 2);
  });
}

TEST(whatACollectiveNeedsOfThoseBeforeItIsNotReadTooEarly) {
  threadRanks(2, [](ncclComm_t comm, int) {
    LaterStream stream;
    std::vector<float> data(1000, 1), large(5'000'000, 1);
    CHECK_NCCL(sum(data, comm, stream.handle()));
    CHECK_NCCL(sum(data, comm, stream.handle()));  // of what the first gives
    stream.run();
    expectAll(data, 4);
    CHECK_NCCL(sum(large, comm, stream.handle()));
    CHECK(!library().published(comm));  // it has several steps
    stream.run();
    expectAll(large, 2);
  });
}

TEST(collectivesOnDifferentStreamsKeepTheirOrder) {
  threadRanks(3, [](ncclComm_t comm, int rank) {
    Stream streams[3];
    std::vector<std::vector<float>> data;
    for (int i = 0; i < 300; ++i) data.emplace_back(1 + i, rank + i);
    for (int i = 0; i < 300; ++i) {
      // Spreads them over the streams in another way on every rank, the caller's own included.
      const int which = (i * (rank + 1) + rank) % 4;
      CHECK_NCCL(sum(data[i], comm, which == 3 ? nullptr : streams[which].handle()));
    }
    for (Stream& stream : streams) stream.synchronize();
    for (int i = 0; i < 300; ++i) expectAll(data[i], 3 + 3 * i);
  });
}

TEST(errorsOnAStreamBecomeAsyncErrors) {
  const ncclUniqueId id = uniqueId();
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    if (rank == 0) {
      Stream stream;
      std::vector<float> data(10);
      CHECK_NCCL(sum(data, comm, stream.handle()));
      stream.synchronize();
      ncclResult_t async = ncclSuccess;
      CHECK_NCCL(nccl().commGetAsyncError(comm, &async));
      CHECK_EQUAL(async, ncclRemoteError);
      CHECK_CONTAINS(nccl().getLastError(comm), "rank 1 destroyed its communicator");
      CHECK_EQUAL(sum(data, comm, stream.handle()), ncclRemoteError);
    }
    CHECK_NCCL(nccl().commDestroy(comm));
  });
}

TEST(groupRunsTransfersTogetherAndThenCollectives) {
  for (const bool onStream : {false, true}) {
    threadRanks(4, [&](ncclComm_t comm, int rank) {
      Stream stream;
      const cudaStream_t handle = onStream ? stream.handle() : nullptr;
      const size_t count = 100'000;  // more than a channel holds
      std::vector<int> out(4 * count), in(4 * count);
      std::iota(out.begin(), out.end(), rank * 10);
      std::vector<float> data(1000, 1), more(70'000, 2);
      CHECK_NCCL(nccl().groupStart());
      CHECK_NCCL(sum(data, comm, handle));
      // Sends first on every rank, to itself too: would deadlock one by one.
      for (int peer = 0; peer < 4; ++peer) {
        CHECK_NCCL(nccl().send(&out[peer * count], count, ncclInt32, peer, comm, handle));
      }
      CHECK_NCCL(nccl().groupStart());
      for (int peer = 0; peer < 4; ++peer) {
        CHECK_NCCL(nccl().recv(&in[peer * count], count, ncclInt32, peer, comm, handle));
      }
      CHECK_NCCL(nccl().groupEnd());
      CHECK_NCCL(sum(more, comm, handle));
      expectAll(data, 1);  // nothing is launched before the outermost end
      CHECK_NCCL(nccl().groupEnd());
      if (onStream) stream.synchronize();
      expectAll(data, 4);
      expectAll(more, 8);
      for (int peer = 0; peer < 4; ++peer) {
        for (size_t i = 0; i < count; ++i) {
          CHECK_EQUAL(in[peer * count + i], static_cast<int>(peer * 10 + rank * count + i));
        }
      }
    });
  }
}

TEST(aGroupOfTwoCommunicatorsOrStreamsLaunchesNothing) {
  const ncclUniqueId id = uniqueId();
  threadRanks(2, [&](ncclComm_t comm, int rank) {
    const ncclComm_t other = init(id, 2, rank);
    Stream first, second;
    std::vector<float> data(10, 1), more(10, 1);
    ncclWaitSignalDesc_t signal{1, 1 - rank, 0, 0};
    const auto refused = [&](ncclComm_t comm, cudaStream_t stream) {
      CHECK_NCCL(nccl().groupStart());
      CHECK_NCCL(sum(data, other, first.handle()));
      CHECK_NCCL(nccl().send(data.data(), 10, ncclFloat32, 1 - rank, other, first.handle()));
      CHECK_NCCL(nccl().waitSignal(1, &signal, other, first.handle()));
      CHECK_NCCL(sum(more, comm, stream));
      CHECK_EQUAL(nccl().groupEnd(), ncclInvalidUsage);
      CHECK_CONTAINS(
          nccl().getLastError(nullptr),
          "groupEnd: a group over shared memory has one communicator and one stream");
    };
    refused(comm, first.handle());
    refused(other, second.handle());
    refused(other, nullptr);
    for (const ncclComm_t each : {comm, other}) {  // what comes now is matched with nothing refused
      std::vector<float> received(10, 0);
      CHECK_NCCL(nccl().groupStart());
      CHECK_NCCL(sum(data, each, first.handle()));
      CHECK_NCCL(nccl().send(more.data(), 10, ncclFloat32, 1 - rank, each, first.handle()));
      CHECK_NCCL(nccl().recv(received.data(), 10, ncclFloat32, 1 - rank, each, first.handle()));
      CHECK_NCCL(nccl().signal(1 - rank, 0, 0, 0, each, first.handle()));
      CHECK_NCCL(nccl().waitSignal(1, &signal, each, first.handle()));
      CHECK_NCCL(nccl().groupEnd());
      first.synchronize();
      expectAll(received, 1);
    }
    expectAll(data, 4);
    CHECK_NCCL(nccl().commDestroy(other));
  });
}

TEST(whatTakesAllRanksIsRefusedInAGroup) {
  const ncclUniqueId id = uniqueId();
  threadRanks(2, [&](ncclComm_t comm, int rank) {
    void* memory = nullptr;
    CHECK_NCCL(nccl().memAlloc(&memory, 8));
    int gone = 1 - rank;
    ncclComm_t made = nullptr;
    ncclWindow_t window = nullptr;
    const std::vector<std::pair<std::string, std::function<ncclResult_t()>>> calls{
        {"commInitRank", [&] { return nccl().commInitRankConfig(&made, 2, id, rank, nullptr); }},
        {"commSplit", [&] { return nccl().commSplit(comm, 0, rank, &made, nullptr); }},
        {"commShrink", [&] { return nccl().commShrink(comm, &gone, 1, &made, nullptr, 0); }},
        {"commWindowRegister",
         [&] { return nccl().commWindowRegister(comm, memory, 8, &window, 0); }},
    };
    std::vector<float> data(10, 1);
    for (const auto& [name, call] : calls) {
      CHECK_NCCL(nccl().groupStart());
      CHECK_NCCL(sum(data, comm, nullptr));
      CHECK_EQUAL(call(), ncclInvalidUsage);
      CHECK_EQUAL(nccl().groupEnd(), ncclInvalidUsage);
      CHECK_CONTAINS(nccl().getLastError(nullptr), name + ": called inside a group");
      CHECK(made == nullptr && window == nullptr);
      expectAll(data, 1);
    }
    CHECK_NCCL(sum(data, comm, nullptr));
    expectAll(data, 2);
    CHECK_NCCL(nccl().memFree(memory));
  });
}

TEST(aBadCallInAGroupLaunchesNothing) {
  threadRanks(2, [](ncclComm_t comm, int) {
    std::vector<float> data(10, 1);
    CHECK_NCCL(nccl().groupStart());
    CHECK_NCCL(sum(data, comm, nullptr));
    CHECK_EQUAL(
        nccl().allReduce(nullptr, data.data(), 10, ncclFloat32, ncclSum, comm, nullptr),
        ncclInvalidArgument);
    CHECK_NCCL(nccl().send(data.data(), 10, ncclFloat32, 0, comm, nullptr));
    CHECK_EQUAL(nccl().groupEnd(), ncclInvalidArgument);
    CHECK_CONTAINS(nccl().getLastError(nullptr), "all_reduce: sendbuff is null");
    expectAll(data, 1);
    CHECK_NCCL(sum(data, comm, nullptr));
    expectAll(data, 2);
    CHECK_EQUAL(nccl().groupEnd(), ncclInvalidUsage);
  });
}
