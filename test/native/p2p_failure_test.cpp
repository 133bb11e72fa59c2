// Failures of sends and receives.
#include <atomic>
#include <chrono>
#include <utility>

#include "Messages.hpp"

using namespace test;

namespace {

void mismatch(ncclComm_t comm, int rank, bool otherType) {
  std::vector<int32_t> buffer(1'000'001);
  ncclResult_t result = ncclSuccess;
  if (rank == 0) {
    result = nccl().send(buffer.data(), 1'000'000, ncclInt32, 1, comm, nullptr);
  } else {
    result = nccl().recv(
        buffer.data(), otherType ? 1'000'000 : 1'000'001, otherType ? ncclFloat32 : ncclInt32, 0,
        comm, nullptr);
  }
  CHECK_EQUAL(result, ncclInvalidUsage);
  CHECK_CONTAINS(errorOf(comm), "rank 1 receives");
  CHECK_CONTAINS(errorOf(comm), "1000000 int32");
  CHECK_CONTAINS(errorOf(comm), "from rank 0");
  CHECK_CONTAINS(errorOf(comm), otherType ? "float32" : "1000001");
}

// Sends `sent` from one rank where the other expects `expected`, then meets until both have
// noticed.
void disagree(size_t sent, size_t expected) {
  for (int round = 0; round < 20; ++round) {
    const ncclUniqueId id = uniqueId();
    threads(2, [&](int rank) {
      const ncclComm_t comm = init(id, 2, rank);
      Completions completions;
      const auto operation = rank == 0 ? sendTagged : recvTagged;
      std::vector<Payload> buffers(10, Payload(rank == 0 ? sent : expected));
      for (Payload& buffer : buffers) {
        completions.issue(operation, message(buffer, 1 - rank), comm);
      }
      float one = 1;
      ncclResult_t result = ncclSuccess;
      while (result == ncclSuccess) {
        result = nccl().allReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr);
      }
      CHECK_EQUAL(result, ncclInvalidUsage);
      CHECK_CONTAINS(errorOf(comm), std::to_string(expected) + " uint8 from rank 0");
      CHECK_NCCL(nccl().commAbort(comm));
      completions.checkEnded();
    });
  }
}

}  // namespace

TEST(aMessageOfAnotherSizeFailsBothSides) {
  everywhere({2}, [](ncclComm_t comm, int rank) { mismatch(comm, rank, false); });
}

TEST(aMessageOfAnotherTypeFailsBothSides) {
  everywhere({2}, [](ncclComm_t comm, int rank) { mismatch(comm, rank, true); });
}

TEST(abortReleasesBlockedTransfersAndFailsPendingOnesOnce) {
  const ncclUniqueId id = uniqueId();
  std::atomic<int> blocked{0};
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    Completions completions;
    Payload never(100);
    for (const Message& one : {message(never, 1 - rank, 5), message(never, kAnyPeer, 6)}) {
      CHECK_NCCL(completions.issue(recvTagged, one, comm));
    }
    std::thread waiting([&] {
      Payload mine(8);
      ++blocked;
      CHECK_EQUAL(recvTagged(message(mine, 1 - rank, 8), comm, nullptr), ncclRemoteError);
    });
    if (rank == 0) {
      while (blocked != 2) std::this_thread::yield();
      CHECK_NCCL(nccl().commAbort(comm));
      CHECK_EQUAL(completions.ended(), 2u);  // none comes after abort
      waiting.join();
    } else {
      waiting.join();
      completions.await();
      CHECK_NCCL(nccl().commAbort(comm));
    }
    completions.checkAll(ncclRemoteError);
  });
}

TEST(aMessageThatFailsWhileItIsIssuedEndsOnce) {
  disagree(4, 5);
  disagree(5, 4);
  disagree(0, 4);
  disagree(4, 0);
}

TEST(aMessageThatIsIssuedWhileThePeerAbortsEndsOnce) {
  for (int round = 0; round < 50; ++round) {
    const ncclUniqueId id = uniqueId();
    std::atomic<int> sent{0};
    threads(2, [&](int rank) {
      const ncclComm_t comm = init(id, 2, rank);
      if (rank == 1) {
        while (sent < 10 + round) std::this_thread::yield();
        CHECK_NCCL(nccl().commAbort(comm));
        return;
      }
      Completions completions;
      Payload small(8), in(8);
      for (auto result = ncclSuccess; result == ncclSuccess; ++sent) {
        completions.issue(sendTagged, message(small, 1, sent % 3), comm);
        result = completions.issue(recvTagged, message(in, 1, sent % 3), comm);
      }
      CHECK_NCCL(nccl().commAbort(comm));
      completions.checkEnded();
    });
  }
}

TEST(aMessageForWhichThereIsNoMemoryEndsOnce) {
  for (const bool staysOut : {false, true}) {
    bool failed = true;
    for (int allocations = 0; failed; ++allocations) {
      const ncclUniqueId id = uniqueId();
      std::atomic<int> waiting{0};
      threads(2, [&](int rank) {
        const ncclComm_t comm = init(id, 2, rank);
        Completions completions;
        const auto send = [&](Payload& buffer, int peer, int tag = 0) {
          completions.issue(sendTagged, message(buffer, peer, tag), comm);
        };
        const auto receive = [&](Payload& buffer, int peer, int tag) {
          completions.issue(recvTagged, message(buffer, peer, tag), comm);
        };
        std::vector<Payload> buffers(6, Payload(8));
        if (rank == 1) {
          for (Payload& buffer : buffers) send(buffer, 0, 1);
          ++waiting;
          while (waiting != 2) std::this_thread::yield();
        } else {
          while (waiting != 1) std::this_thread::yield();
          memoryStaysOut = staysOut;
          allocationsLeft = allocations;
          receive(buffers[0], 1, 2);  // finds messages that it has to keep
          receive(buffers[1], 1, 1);
          receive(buffers[2], kAnyPeer, 1);
          send(buffers[3], 1);
          send(buffers[4], 0, 3);
          receive(buffers[5], 0, 3);
          failed = std::exchange(allocationsLeft, -1) <= 0;
          ++waiting;
        }
        CHECK_NCCL(nccl().commAbort(comm));
        completions.checkEnded();
      });
      CHECK(allocations < 1000);
    }
  }
}

TEST(destroyFailsPendingTransfersBeforeItReturns) {
  const ncclComm_t comm = init(uniqueId(), 1, 0);
  Completions completions;
  Payload never(100);
  CHECK_NCCL(completions.issue(recvTagged, message(never, kAnyPeer, 5), comm));
  CHECK_NCCL(nccl().commDestroy(comm));
  CHECK_EQUAL(completions.ended(), 1u);
}

TEST(aDeadPeerIsNamed) {
  const ncclUniqueId id = uniqueId();
  int ready[2];
  CHECK(pipe(ready) == 0);
  Processes processes;
  processes.start([&] {
    const ncclComm_t comm = init(id, 2, 1);
    Payload never(10);
    CHECK(write(ready[1], "x", 1) == 1);
    recvTagged(message(never, 0), comm, nullptr);
  });
  const std::string pid = std::to_string(processes.pid(0));
  const ncclComm_t comm = init(id, 2, 0);
  char byte;
  CHECK(read(ready[0], &byte, 1) == 1);
  Completions completions;
  Payload never(10);
  CHECK_NCCL(completions.issue(recvTagged, message(never, 1, 1), comm));
  std::thread killer([&] { processes.kill(0); });
  CHECK_EQUAL(recvTagged(message(never, 1), comm, nullptr), ncclRemoteError);
  CHECK_CONTAINS(errorOf(comm), "rank 1");
  CHECK_CONTAINS(errorOf(comm), pid);
  killer.join();
  completions.await();
  completions.checkAll(ncclRemoteError);
  CHECK_NCCL(nccl().commAbort(comm));
}

TEST(whatWasSentBeforeDepartureArrives) {
  everywhere({3}, [](ncclComm_t comm, int rank) {
    // Rank 1 destroys its communicator at once; the others go on.
    if (rank == 1) {
      for (int i = 0; i < 5; ++i) send(comm, content(1000, i), 0, i % 2);
    } else if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      send(comm, content(1000, 9), 0, 2);  // nothing for him who takes any rank's
    } else {
      std::vector<Payload> in(6, Payload(1000));
      CHECK_NCCL(nccl().groupStart());
      for (int i = 0; i < 5; ++i) {
        CHECK_NCCL(recvTagged(message(in[i], i == 4 ? kAnyPeer : 1, i % 2), comm, nullptr));
      }
      CHECK_NCCL(recvTagged(message(in[5], 2, 2), comm, nullptr));
      CHECK_NCCL(nccl().groupEnd());
      for (int i = 0; i < 4; ++i) CHECK(in[i] == content(1000, i));
      CHECK(in[4] == content(1000, 4));
      CHECK(in[5] == content(1000, 9));
    }
  });
}
