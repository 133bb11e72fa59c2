// Failures of sends and receives.
#include <atomic>
#include <chrono>
#include <utility>

#include "Allocations.hpp"
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
        buffer.data(),
        otherType ? 1'000'000 : 1'000'001,
        otherType ? ncclFloat32 : ncclInt32,
        0,
        comm,
        nullptr);
  }
  CHECK_EQUAL(result, ncclInvalidUsage);
  CHECK_CONTAINS(errorOf(comm), "rank 1 receives");
  CHECK_CONTAINS(errorOf(comm), "1000000 int32");
  CHECK_CONTAINS(errorOf(comm), "from rank 0");
  CHECK_CONTAINS(errorOf(comm), otherType ? "float32" : "1000001");
}

// Messages with `done`, and what their calls returned.
class Issued {
 public:
  ncclResult_t send(ncclComm_t comm, Buffer& buffer, int peer, int tag = 0) {
    return issue(nccl().sendTagged, message(buffer, peer, tag), comm);
  }
  ncclResult_t receive(ncclComm_t comm, Buffer& buffer, int peer, int tag = 0) {
    return issue(nccl().recvTagged, message(buffer, peer, tag), comm);
  }
  size_t failed() const { return failed_; }
  // Checks, once the communicator is gone, that `done` has been called for each message that the
  // library has accepted, and for none that it has refused.
  void check() const {
    for (const auto& one : all_) CHECK_EQUAL(one->calls.load(), one->accepted ? 1 : 0);
  }

 private:
  struct One {
    std::atomic<int> calls{0};
    bool accepted = false;
  };

  template <class Operation>
  ncclResult_t issue(Operation operation, Message message, ncclComm_t comm) {
    const int allocations = std::exchange(allocationsLeft, -1);
    all_.push_back(std::make_unique<One>());
    message.context = all_.back().get();
    message.done = [](void* context, ncclResult_t, int) noexcept {
      ++static_cast<One*>(context)->calls;
    };
    allocationsLeft = allocations;
    const ncclResult_t result = operation(message, comm, nullptr);
    all_.back()->accepted = result == ncclSuccess;
    failed_ += result != ncclSuccess;
    return result;
  }

  std::vector<std::unique_ptr<One>> all_;
  size_t failed_ = 0;
};

// Sends `sent` from one rank where the other expects `expected`, then meets until both have
// noticed.
void disagree(size_t sent, size_t expected) {
  for (int round = 0; round < 20; ++round) {
    const ncclUniqueId id = uniqueId();
    threads(2, [&](int rank) {
      const ncclComm_t comm = init(id, 2, rank);
      Issued issued;
      std::vector<Buffer> buffers(10, Buffer(rank == 0 ? sent : expected));
      for (Buffer& buffer : buffers) {
        rank == 0 ? issued.send(comm, buffer, 1) : issued.receive(comm, buffer, 0);
      }
      float one = 1;
      ncclResult_t result = ncclSuccess;
      while (result == ncclSuccess) {
        result = nccl().allReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, nullptr);
      }
      CHECK_EQUAL(result, ncclInvalidUsage);
      CHECK_CONTAINS(errorOf(comm), std::to_string(expected) + " uint8 from rank 0");
      CHECK_NCCL(nccl().commAbort(comm));
      issued.check();
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
    Buffer never(100);
    Message pending = message(never, 1 - rank, 5), anyone = message(never, kAnyPeer, 6);
    for (Message* one : {&pending, &anyone}) {
      completions.expect(*one);
      CHECK_NCCL(nccl().recvTagged(*one, comm, nullptr));
    }
    std::thread waiting([&] {
      Buffer mine(8);
      ++blocked;
      CHECK_EQUAL(nccl().recvTagged(message(mine, 1 - rank, 8), comm, nullptr), ncclRemoteError);
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
      Issued issued;
      Buffer small(8), in(8);
      while (issued.failed() == 0) {
        issued.send(comm, small, 1, sent % 3);
        issued.receive(comm, in, 1, sent % 3);
        ++sent;
      }
      CHECK_NCCL(nccl().commAbort(comm));
      issued.check();
    });
  }
}

TEST(aMessageForWhichThereIsNoMemoryEndsOnce) {
  bool failed = true;
  for (int allocations = 0; failed; ++allocations) {
    const ncclUniqueId id = uniqueId();
    std::atomic<int> waiting{0};
    threads(2, [&](int rank) {
      const ncclComm_t comm = init(id, 2, rank);
      Issued issued;
      std::vector<Buffer> buffers(6, Buffer(8));
      if (rank == 1) {
        for (Buffer& buffer : buffers) issued.send(comm, buffer, 0, 1);
        ++waiting;
        while (waiting != 2) std::this_thread::yield();
      } else {
        while (waiting != 1) std::this_thread::yield();
        allocationsLeft = allocations;
        issued.receive(comm, buffers[0], 1, 2);  // finds messages that it has to keep
        issued.receive(comm, buffers[1], 1, 1);
        issued.receive(comm, buffers[2], kAnyPeer, 1);
        issued.send(comm, buffers[3], 1);
        issued.send(comm, buffers[4], 0, 3);
        issued.receive(comm, buffers[5], 0, 3);
        failed = std::exchange(allocationsLeft, -1) < 0;
        ++waiting;
      }
      CHECK_NCCL(nccl().commAbort(comm));
      issued.check();
    });
    CHECK(allocations < 1000);
  }
}

TEST(destroyFailsPendingTransfersBeforeItReturns) {
  const ncclComm_t comm = init(uniqueId(), 1, 0);
  Completions completions;
  Buffer never(100);
  Message pending = message(never, kAnyPeer, 5);
  completions.expect(pending);
  CHECK_NCCL(nccl().recvTagged(pending, comm, nullptr));
  CHECK_NCCL(nccl().commDestroy(comm));
  CHECK_EQUAL(completions.ended(), 1u);
}

TEST(aKilledPeerIsNamed) {
  const ncclUniqueId id = uniqueId();
  int ready[2];
  CHECK(pipe(ready) == 0);
  Processes processes;
  processes.start([&] {
    const ncclComm_t comm = init(id, 2, 1);
    Buffer never(10);
    CHECK(write(ready[1], "x", 1) == 1);
    nccl().recvTagged(message(never, 0), comm, nullptr);
  });
  const std::string pid = std::to_string(processes.pid(0));
  const ncclComm_t comm = init(id, 2, 0);
  char byte;
  CHECK(read(ready[0], &byte, 1) == 1);
  Completions completions;
  Buffer never(10);
  Message pending = message(never, 1, 1);
  completions.expect(pending);
  CHECK_NCCL(nccl().recvTagged(pending, comm, nullptr));
  std::thread killer([&] { processes.kill(0); });
  CHECK_EQUAL(nccl().recvTagged(message(never, 1), comm, nullptr), ncclRemoteError);
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
      std::vector<Buffer> in(6, Buffer(1000));
      CHECK_NCCL(nccl().groupStart());
      for (int i = 0; i < 5; ++i) {
        CHECK_NCCL(nccl().recvTagged(message(in[i], i == 4 ? kAnyPeer : 1, i % 2), comm, nullptr));
      }
      CHECK_NCCL(nccl().recvTagged(message(in[5], 2, 2), comm, nullptr));
      CHECK_NCCL(nccl().groupEnd());
      for (int i = 0; i < 4; ++i) CHECK(in[i] == content(1000, i));
      CHECK(in[4] == content(1000, 4));
      CHECK(in[5] == content(1000, 9));
    }
  });
}
