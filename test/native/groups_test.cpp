// Streams and groups behave as NCCL's do.
#include <atomic>
#include <barrier>
#include <numeric>

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
      CHECK(nccl().published(comm));
      CHECK_NCCL(nccl().recv(token.data(), 1, ncclFloat32, 1, comm, nullptr));
      expectAll(data, 1);
      stream.run();
      CHECK(!nccl().published(comm));
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
    CHECK(!nccl().published(comm));  // it has several steps
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

TEST(oneThreadDrivesSeveralRanks) {
  const ncclUniqueId id = uniqueId();
  ncclComm_t comms[3];
  CHECK_NCCL(nccl().groupStart());
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_NCCL(nccl().commInitRankConfig(&comms[rank], 3, id, rank, nullptr));
  }
  CHECK_NCCL(nccl().groupEnd());
  std::vector<std::vector<float>> data(3, std::vector<float>(200'000, 1));
  Stream shared;
  for (const cudaStream_t stream : {cudaStream_t{nullptr}, shared.handle()}) {
    for (auto& values : data) values.assign(values.size(), 1);
    CHECK_NCCL(nccl().groupStart());
    for (int rank = 0; rank < 3; ++rank) CHECK_NCCL(sum(data[rank], comms[rank], stream));
    CHECK_NCCL(nccl().groupEnd());
    shared.synchronize();
    for (const auto& values : data) expectAll(values, 3);
  }
  ncclComm_t halves[3];
  CHECK_NCCL(nccl().groupStart());
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_NCCL(nccl().commSplit(comms[rank], rank == 2, 0, &halves[rank], nullptr));
  }
  CHECK_NCCL(nccl().groupEnd());
  int count = 0;
  CHECK_NCCL(nccl().commCount(halves[0], &count));
  CHECK_EQUAL(count, 2);
  CHECK_NCCL(nccl().commCount(halves[2], &count));
  CHECK_EQUAL(count, 1);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_NCCL(nccl().commDestroy(halves[rank]));
    CHECK_NCCL(nccl().commDestroy(comms[rank]));
  }
}

TEST(groupWaitsForAllItsStreams) {
  threadRanks(2, [](ncclComm_t comm, int) {
    Stream first, second;
    std::atomic<bool> earlierEnded{false};
    std::vector<float> a(10, 1), b(10, 2);
    first.enqueue([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      earlierEnded = true;
    });
    CHECK_NCCL(nccl().groupStart());
    CHECK_NCCL(sum(a, comm, first.handle()));
    CHECK_NCCL(sum(b, comm, second.handle()));
    CHECK_NCCL(nccl().groupEnd());
    second.synchronize();
    CHECK(earlierEnded);
    expectAll(a, 2);
    expectAll(b, 4);
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

TEST(abortEndsAGroupWhoseStreamNeverComes) {
  const ncclUniqueId id = uniqueId();
  std::barrier launched(2);
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    Stream stuck, free;
    std::atomic<bool> release{false};
    stuck.enqueue([&] {
      while (!release) std::this_thread::yield();
    });
    std::vector<float> a(10), b(10);
    CHECK_NCCL(nccl().groupStart());
    CHECK_NCCL(sum(a, comm, stuck.handle()));
    CHECK_NCCL(sum(b, comm, free.handle()));
    CHECK_NCCL(nccl().groupEnd());
    launched.arrive_and_wait();
    CHECK_NCCL(nccl().commAbort(comm));
    free.synchronize();
    release = true;
  });
}
