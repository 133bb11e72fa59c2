// Windows: memory that peers put into, and the signals that tell of it.
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>

#include "Ranks.hpp"
#include "Streams.hpp"
#include "shm/Window.hpp"

using namespace test;
using torchcomms_pg::WindowView;
using torchcomms_pg::shm::kNoSignal;

namespace {

// Memory of memAlloc, as integers.
struct Integers {
  explicit Integers(size_t count) : count(count) {
    void* memory = nullptr;
    CHECK_NCCL(nccl().memAlloc(&memory, count * sizeof(int)));
    data = static_cast<int*>(memory);
  }
  ~Integers() { CHECK_NCCL(nccl().memFree(data)); }
  int* data;
  size_t count;
};

ncclWindow_t open(ncclComm_t comm, const Integers& buffer) {
  ncclWindow_t window = nullptr;
  CHECK_NCCL(
      nccl().commWindowRegister(
          comm, buffer.data, buffer.count * sizeof(int), &window, NCCL_WIN_DEFAULT));
  CHECK(window != nullptr);
  return window;
}

ncclResult_t put(
    ncclComm_t comm, ncclWindow_t window, const std::vector<int>& content, int peer, size_t at,
    int signal = kNoSignal, cudaStream_t stream = nullptr) {
  return nccl().putSignal(
      content.data(), content.size(), ncclInt32, peer, window, at * sizeof(int), signal, 0, 0, comm,
      stream);
}

ncclResult_t signal(ncclComm_t comm, int peer, int index = 0, cudaStream_t stream = nullptr) {
  return nccl().signal(peer, index, 0, 0, comm, stream);
}

ncclResult_t wait(
    ncclComm_t comm, int peer, int count = 1, int index = 0, cudaStream_t stream = nullptr) {
  ncclWaitSignalDesc_t one{count, peer, index, 0};
  return nccl().waitSignal(1, &one, comm, stream);
}

// Puts from every rank to the next one, round after round, with no other synchronization than
// signals: one there, one back.
void ring(ncclComm_t comm, int rank, int ranks) {
  constexpr size_t kPart = 3'000'000;  // more than one piece of a put
  const Integers buffer(kPart + 7);
  const ncclWindow_t window = open(comm, buffer);
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  for (int round = 0; round < 4; ++round) {
    std::vector<int> content(kPart);
    std::iota(content.begin(), content.end(), 1000 * rank + round);
    CHECK_NCCL(put(comm, window, content, next, 7));
    CHECK_NCCL(signal(comm, next, 5));
    CHECK_NCCL(wait(comm, previous, 1, 5));
    for (size_t i = 0; i < kPart; ++i) {
      if (buffer.data[7 + i] != 1000 * previous + round + static_cast<int>(i)) CHECK(false);
    }
    CHECK_NCCL(signal(comm, previous, 6));
    CHECK_NCCL(wait(comm, next, 1, 6));
  }
  CHECK_NCCL(barrier(comm));
  CHECK_NCCL(nccl().commWindowDeregister(comm, window));
}

}  // namespace

TEST(windowRingOfThreads) {
  for (const int ranks : {1, 2, 3}) {
    threadRanks(ranks, [&](ncclComm_t comm, int rank) { ring(comm, rank, ranks); });
  }
}

TEST(windowRingOfProcesses) {
  for (const int ranks : {2, 3}) {
    processRanks(ranks, [&](ncclComm_t comm, int rank) { ring(comm, rank, ranks); });
  }
}

TEST(windowsOfDifferentSizes) {
  threadRanks(3, [](ncclComm_t comm, int rank) {
    // Rank 0 registers nothing, rank 2 the middle of its memory.
    const Integers buffer(5000);
    ncclWindow_t window = nullptr;
    int* const mine = buffer.data + 1500;
    const size_t bytes = static_cast<size_t>(rank) * 100 * sizeof(int);
    CHECK_NCCL(nccl().commWindowRegister(comm, rank == 0 ? nullptr : mine, bytes, &window, 0));
    WindowView own;
    CHECK_NCCL(library().windowView(comm, window, rank, own));
    CHECK_EQUAL(own.bytes, bytes);
    CHECK_EQUAL(own.memory.get(), reinterpret_cast<std::byte*>(rank == 0 ? nullptr : mine));
    CHECK_EQUAL(put(comm, window, {1}, 0, 0), ncclInvalidArgument);
    CHECK_NCCL(put(comm, window, {}, 0, 0));
    CHECK_EQUAL(put(comm, window, {1}, 1, 100), ncclInvalidArgument);
    CHECK_EQUAL(put(comm, window, {1, 2}, 2, 199), ncclInvalidArgument);
    CHECK_CONTAINS(nccl().getLastError(comm), "800 bytes that rank 2 has registered");
    CHECK_NCCL(put(comm, window, {rank + 1}, 1, 10 + rank));
    CHECK_NCCL(put(comm, window, {rank + 1}, 2, 199 - rank));
    CHECK_NCCL(barrier(comm));
    for (int source = 0; source < 3; ++source) {
      if (rank == 1) CHECK_EQUAL(mine[10 + source], source + 1);
      if (rank == 2) CHECK_EQUAL(mine[199 - source], source + 1);
      CHECK(rank == 0 || mine[200] == 0);
    }
    WindowView view;
    CHECK_NCCL(library().windowView(comm, window, 2, view));
    CHECK_EQUAL(view.bytes, 800u);
    CHECK_EQUAL(reinterpret_cast<int*>(view.memory.get())[199], 1);
    CHECK_NCCL(barrier(comm));
  });
}

TEST(signalsAreCountedByPeerAndIndex) {
  threadRanks(3, [](ncclComm_t comm, int rank) {
    constexpr int kCount = 1000;
    if (rank != 0) {
      for (int i = 0; i < kCount; ++i) CHECK_NCCL(signal(comm, 0, rank));
      CHECK_NCCL(wait(comm, 0));
      return;
    }
    ncclWaitSignalDesc_t both[] = {{kCount - 1, 1, 1, 0}, {kCount, 2, 2, 0}};
    CHECK_NCCL(nccl().waitSignal(2, both, comm, nullptr));
    CHECK_NCCL(wait(comm, 1, 1, 1));
    Stream stream;
    std::atomic<bool> more{false};
    CHECK_NCCL(wait(comm, 0, 1, 127, stream.handle()));
    stream.enqueue([&] { more = true; });
    CHECK(!more);  // its own signal is the one that it waits for
    CHECK_NCCL(signal(comm, 0, 127));
    stream.synchronize();
    CHECK(more);
    CHECK_NCCL(signal(comm, 1));
    CHECK_NCCL(signal(comm, 2));
  });
}

TEST(putsAndSignalsKeepTheOrderOfTheirStream) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    const Integers buffer(4);
    const ncclWindow_t window = open(comm, buffer);
    Stream stream;
    const int peer = 1 - rank;
    std::vector<std::vector<int>> contents;
    for (int round = 0; round < 50; ++round) contents.push_back({round, round, round, round});
    for (int round = 0; round < 50; ++round) {
      CHECK_NCCL(put(comm, window, contents[round], peer, 0, 1, stream.handle()));
      CHECK_NCCL(wait(comm, peer, 1, 1));
      for (int i = 0; i < 4; ++i) CHECK_EQUAL(buffer.data[i], round);
      CHECK_NCCL(signal(comm, peer, 2, stream.handle()));
      CHECK_NCCL(wait(comm, peer, 1, 2, stream.handle()));
    }
    stream.synchronize();
    CHECK_NCCL(barrier(comm));
  });
}

TEST(windowOperationsInAGroup) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    const Integers buffer(2);
    const int peer = 1 - rank;
    const ncclWindow_t window = open(comm, buffer);
    const std::vector<int> content{rank + 10};
    int token = rank, received = -1;
    CHECK_NCCL(nccl().groupStart());
    CHECK_NCCL(wait(comm, peer));
    CHECK_NCCL(nccl().recv(&received, 1, ncclInt32, peer, comm, nullptr));
    CHECK_NCCL(nccl().send(&token, 1, ncclInt32, peer, comm, nullptr));
    CHECK_NCCL(put(comm, window, content, peer, 1));
    CHECK_NCCL(signal(comm, peer));
    CHECK_NCCL(nccl().groupEnd());
    CHECK_EQUAL(received, peer);
    CHECK_EQUAL(buffer.data[1], peer + 10);
    CHECK_NCCL(barrier(comm));
  });
}

TEST(viewOutlivesWindowMemoryAndCommunicator) {
  std::vector<WindowView> views(2);
  std::atomic<int> freed{0};
  {
    const ncclUniqueId id = uniqueId();
    threads(2, [&](int rank) {
      const ncclComm_t comm = init(id, 2, rank);
      auto buffer = std::make_unique<Integers>(3000);
      const ncclWindow_t window = open(comm, *buffer);
      buffer->data[2999] = 40 + rank;
      CHECK_NCCL(barrier(comm));
      CHECK_NCCL(library().windowView(comm, window, 1 - rank, views[rank]));
      CHECK_NCCL(nccl().commWindowDeregister(comm, window));
      CHECK_EQUAL(nccl().commWindowDeregister(comm, window), ncclInvalidArgument);
      CHECK_EQUAL(put(comm, window, {1}, 0, 0), ncclInvalidArgument);
      buffer.reset();
      CHECK_NCCL(nccl().commDestroy(comm));
      ++freed;
    });
  }
  for (int rank = 0; rank < 2; ++rank) {
    auto* const content = reinterpret_cast<int*>(views[rank].memory.get());
    CHECK_EQUAL(content[2999], 41 - rank);
    content[0] = 7;
  }
  CHECK_EQUAL(mappedSegments(), 2);
  views.clear();
  CHECK_EQUAL(mappedSegments(), 0);
}

TEST(windowsLeaveNothingBehind) {
  // The stream of errors opens nothing any more.
  const int filesBefore = descriptors();
  for (int i = 0; i < 20; ++i) {
    threadRanks(2, [](ncclComm_t comm, int) {
      const Integers buffer(100), other(5000);
      const ncclWindow_t window = open(comm, buffer);
      open(comm, other);  // left to the end of the communicator
      CHECK_NCCL(barrier(comm));
      CHECK_NCCL(nccl().commWindowDeregister(comm, window));
    });
  }
  CHECK_EQUAL(descriptors(), filesBefore);
  CHECK_EQUAL(mappedSegments(), 0);
}

TEST(windowArgumentsAreChecked) {
  threadRanks(1, [](ncclComm_t comm, int) {
    std::vector<int> own(10);
    ncclWindow_t window = nullptr;
    CHECK_EQUAL(nccl().commWindowRegister(comm, own.data(), 40, &window, 0), ncclInvalidArgument);
    CHECK_CONTAINS(nccl().getLastError(comm), "memory that memAlloc returned");
    const Integers buffer(10);
    CHECK_EQUAL(nccl().commWindowRegister(comm, buffer.data, 41, &window, 0), ncclInvalidArgument);
    CHECK_EQUAL(nccl().commWindowRegister(comm, buffer.data, 40, &window, 8), ncclInvalidArgument);
    CHECK_EQUAL(nccl().commWindowRegister(comm, nullptr, 4, &window, 0), ncclInvalidArgument);
    CHECK_EQUAL(nccl().commWindowRegister(comm, buffer.data, 40, nullptr, 0), ncclInvalidArgument);
    window = open(comm, buffer);
    CHECK_EQUAL(put(comm, window, {1}, 1, 0), ncclInvalidArgument);
    CHECK_EQUAL(put(comm, window, {1}, -1, 0), ncclInvalidArgument);
    CHECK_EQUAL(put(comm, nullptr, {1}, 0, 0), ncclInvalidArgument);
    CHECK_EQUAL(put(comm, window, {1}, 0, SIZE_MAX / 4), ncclInvalidArgument);
    CHECK_EQUAL(put(comm, window, {1}, 0, 0, 128), ncclInvalidArgument);
    CHECK_EQUAL(signal(comm, 0, -1), ncclInvalidArgument);
    CHECK_EQUAL(signal(comm, 0, 128), ncclInvalidArgument);
    CHECK_EQUAL(signal(comm, 1), ncclInvalidArgument);
    CHECK_EQUAL(nccl().signal(0, 0, 1, 0, comm, nullptr), ncclInvalidArgument);
    CHECK_EQUAL(nccl().signal(0, 0, 0, 1, comm, nullptr), ncclInvalidArgument);
    CHECK_EQUAL(wait(comm, 1), ncclInvalidArgument);
    CHECK_EQUAL(wait(comm, 0, 0), ncclInvalidArgument);
    CHECK_EQUAL(nccl().waitSignal(0, nullptr, comm, nullptr), ncclInvalidArgument);
    CHECK_EQUAL(nccl().waitSignal(1, nullptr, comm, nullptr), ncclInvalidArgument);
    // A put within the rank's own window may overlap itself.
    std::iota(buffer.data, buffer.data + 10, 0);
    CHECK_NCCL(
        nccl().putSignal(buffer.data, 9, ncclInt32, 0, window, 4, kNoSignal, 0, 0, comm, nullptr));
    for (int i = 1; i < 10; ++i) CHECK_EQUAL(buffer.data[i], i - 1);
    CHECK_NCCL(signal(comm, 0));
    CHECK_NCCL(wait(comm, 0));
  });
}

TEST(memoryThatTheSystemDoesNotHaveIsAnError) {
  for (const size_t bytes : {SIZE_MAX / 2, size_t{1} << 46}) {
    void* memory = &memory;
    CHECK_EQUAL(nccl().memAlloc(&memory, bytes), ncclSystemError);
    CHECK(memory == nullptr);
    CHECK_CONTAINS(nccl().getLastError(nullptr), std::to_string(bytes) + " bytes, and the system");
  }
}

TEST(waitForADeadRankNamesIt) {
  const ncclUniqueId id = uniqueId();
  int ready[2];
  CHECK(pipe(ready) == 0);
  Processes processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.start([&, rank] {
      const ncclComm_t comm = init(id, 2, rank);
      const Integers buffer(10);
      const ncclWindow_t window = open(comm, buffer);
      CHECK_NCCL(put(comm, window, {rank + 1}, 1 - rank, 0));
      CHECK_NCCL(signal(comm, 1 - rank));
      if (rank == 1) {
        CHECK(write(ready[1], "x", 1) == 1);
        pause();
      }
      CHECK_NCCL(wait(comm, 1));  // was sent before
      CHECK_EQUAL(buffer.data[0], 2);
      CHECK_EQUAL(wait(comm, 1), ncclRemoteError);
      CHECK_CONTAINS(nccl().getLastError(comm), "rank 1 (pid ");
      CHECK_CONTAINS(nccl().getLastError(comm), "died");
      CHECK(library().missingRanks(comm) == std::vector<int>{1});
      CHECK_EQUAL(put(comm, window, {1}, 1, 0), ncclRemoteError);
      CHECK_NCCL(nccl().commDestroy(comm));
    });
  }
  char ignored;
  CHECK(read(ready[0], &ignored, 1) == 1);
  processes.kill(1);
  processes.join(0);
}

TEST(abortAndFailureEndAWait) {
  for (const bool aborts : {false, true}) {
    const ncclUniqueId id = uniqueId();
    std::atomic<bool> waiting{false};
    threads(2, [&](int rank) {
      const ncclComm_t comm = init(id, 2, rank);
      if (rank == 0) {
        std::thread watch([&] {
          while (library().missingRanks(comm) != std::vector<int>{1}) std::this_thread::yield();
          waiting = true;
        });
        CHECK_EQUAL(wait(comm, 1), ncclRemoteError);
        watch.join();
        CHECK_NCCL(nccl().commDestroy(comm));
        return;
      }
      while (!waiting) std::this_thread::yield();
      if (aborts) {
        CHECK_NCCL(nccl().commAbort(comm));
      } else {
        CHECK_NCCL(library().fail(comm, ncclRemoteError, "too late", {0}));
        CHECK_NCCL(nccl().commDestroy(comm));
      }
    });
  }
}

TEST(signalToARankThatLeftIsAnError) {
  const ncclUniqueId id = uniqueId();
  std::atomic<bool> gone{false};
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    CHECK_NCCL(barrier(comm));
    if (rank == 1) {
      CHECK_NCCL(nccl().commDestroy(comm));
      gone = true;
      return;
    }
    while (!gone) std::this_thread::yield();
    CHECK_EQUAL(signal(comm, 1), ncclRemoteError);
    CHECK_CONTAINS(nccl().getLastError(comm), "rank 1 destroyed its communicator");
    CHECK_NCCL(nccl().commDestroy(comm));
  });
}

TEST(windowAgainstAnotherCollectiveIsAMismatch) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    const Integers buffer(10);
    ncclWindow_t window = nullptr;
    if (rank == 0) {
      CHECK_EQUAL(nccl().commWindowRegister(comm, buffer.data, 40, &window, 0), ncclInvalidUsage);
      CHECK(window == nullptr);
    } else {
      int data = 0;
      CHECK_EQUAL(
          nccl().allReduce(&data, &data, 1, ncclInt32, ncclSum, comm, nullptr), ncclInvalidUsage);
    }
    CHECK_CONTAINS(nccl().getLastError(comm), "rank 0 calls commWindowRegister");
  });
}
