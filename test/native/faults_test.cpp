// Failures: whatever happens to one rank, the others learn it and go on.
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>

#include "Allocations.hpp"
#include "Locales.hpp"
#include "Ranks.hpp"
#include "host/HostStream.hpp"
#include "host/Interrupt.hpp"
#include "host/NcclError.hpp"
#include "host/Process.hpp"
#include "shm/Comm.hpp"
#include "shm/api/Handles.hpp"

using namespace test;
using Clock = std::chrono::steady_clock;

namespace {

double secondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

ncclResult_t sum(ncclComm_t comm, std::vector<float>& data) {
  return nccl().allReduce(
      data.data(), data.data(), data.size(), ncclFloat32, ncclSum, comm, nullptr);
}

// Takes all descriptors while it lives, so that nothing of /proc can be read.
class NoDescriptors {
 public:
  NoDescriptors() {
    CHECK(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit none{0, before_.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  }
  ~NoDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_;
};

}  // namespace

TEST(onlyWhatHasCertainlyEndedIsDead) {
  using namespace torchcomms_pg::shm;
  Processes processes;
  processes.start([] { pause(); });
  const auto pid = static_cast<uint32_t>(processes.pid(0));
  const uint64_t start = processStartTime(pid);
  CHECK(start != 0);
  CHECK(processAlive(pid, start));
  CHECK(processAlive(pid, 0));
  CHECK(!processAlive(pid, start + 1));  // another process, with its number
  {
    const NoDescriptors none;
    CHECK_EQUAL(processStartTime(pid), uint64_t{0});
    CHECK(processAlive(pid, start));
    CHECK(processAlive(pid, 0));
  }
  CHECK(kill(processes.pid(0), SIGKILL) == 0);
  while (processAlive(pid, start)) std::this_thread::yield();  // ends as a zombie
  processes.kill(0);
  CHECK(!processAlive(pid, start));
  const NoDescriptors none;
  CHECK(!processAlive(pid, start));
}

TEST(aProcessWhoseFirstThreadHasEndedIsAlive) {
  using namespace torchcomms_pg::shm;
  Processes processes;
  processes.start([] {
    std::thread([] { pause(); }).detach();
    pthread_exit(nullptr);
  });
  const auto pid = static_cast<uint32_t>(processes.pid(0));
  while (torchcomms_pg::host::processState(pid) != 'Z') std::this_thread::yield();
  CHECK(processAlive(pid, processStartTime(pid)));
  CHECK(kill(processes.pid(0), SIGKILL) == 0);
  while (processAlive(pid, 0)) std::this_thread::yield();
  processes.kill(0);
}

TEST(aLatePeerIsNotDeadForWantOfADescriptor) {
  processRanks(2, [](ncclComm_t comm, int rank) {
    std::vector<float> data(10);
    CHECK_EQUAL(sum(comm, data), ncclSuccess);
    const NoDescriptors none;
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(1));  // several looks
    CHECK_EQUAL(sum(comm, data), ncclSuccess);
  });
}

TEST(ranksOfAProcessMayBeNamedAtOnceAndWhileOneIsAsked) {
  threadRanks(4, [](ncclComm_t comm, int) {
    auto& segment = torchcomms_pg::shm::findHandle(comm, "test")->segment();
    const std::string last = "rank 33 on a host with a long name";
    for (int turn = 0; turn < 20'000; ++turn) {
      segment.nameRanks({"rank 0", "rank 11", "rank 22", last});
      CHECK_EQUAL(segment.nameOf(3), last);
    }
    std::vector<float> data(10);
    CHECK_EQUAL(sum(comm, data), ncclSuccess);
  });
}

TEST(whatARankHasDoneBeforeItLeftIsTakenAlsoIfItIsSeenToHaveLeftFirst) {
  const ncclUniqueId id = uniqueId();
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    if (rank == 1) {
      CHECK_NCCL(nccl().commDestroy(comm));
      return;
    }
    auto& segment = torchcomms_pg::shm::findHandle(comm, "test")->segment();
    using torchcomms_pg::shm::Phase;
    while (segment.state(1).phase.load() <= Phase::joined) std::this_thread::yield();
    int looks = 0;  // at rank 1, which has left; the second one fails the wait
    const torchcomms_pg::shm::Waiter waiter(segment, 0);
    waiter.wait([&] { return looks >= 2; }, [&](int) { return ++looks > 0; });
    CHECK_PASSED(departedAfterItsPart);
    CHECK(!segment.failed());
    CHECK_NCCL(nccl().commDestroy(comm));
  });
}

TEST(deadRankIsNamedAndNothingIsLeft) {
  for (const bool oversubscribed : {false, true}) {
    const int ranks = oversubscribed ? 4 : 2;
    const ncclUniqueId id = uniqueId();
    int running[2];
    CHECK(pipe(running) == 0);
    Processes processes;
    for (int rank = 0; rank < ranks; ++rank) {
      processes.start([&, rank] {
        const int filesBefore = descriptors();
        const ncclComm_t comm = init(id, ranks, rank);
        std::vector<float> data(500'000);
        CHECK_EQUAL(sum(comm, data), ncclSuccess);
        CHECK(write(running[1], "x", 1) == 1);
        ncclResult_t result = ncclSuccess;
        while (result == ncclSuccess) result = sum(comm, data);
        CHECK_EQUAL(result, ncclRemoteError);
        CHECK_CONTAINS(nccl().getLastError(comm), "rank " + std::to_string(ranks - 1) + " (pid ");
        CHECK_CONTAINS(nccl().getLastError(comm), "died");
        ncclResult_t async = ncclSuccess;
        CHECK_NCCL(nccl().commGetAsyncError(comm, &async));
        CHECK_EQUAL(async, ncclRemoteError);
        CHECK_EQUAL(sum(comm, data), ncclRemoteError);
        CHECK_NCCL(nccl().commDestroy(comm));
        CHECK_EQUAL(descriptors(), filesBefore);
        CHECK_EQUAL(mappedSegments(), 0);
      });
    }
    char ignored;
    for (int i = 0; i < ranks; ++i) CHECK(read(running[0], &ignored, 1) == 1);
    const auto start = Clock::now();
    processes.kill(ranks - 1);
    for (int rank = 0; rank < ranks - 1; ++rank) processes.join(rank);
    CHECK(secondsSince(start) < 5);  // about one is promised; machines may be busy
    close(running[0]);
    close(running[1]);
  }
}

TEST(rankDeadDuringInitIsNamed) {
  const ncclUniqueId id = uniqueId();
  Processes processes;
  processes.start([&] {
    ncclComm_t comm = nullptr;
    CHECK_EQUAL(nccl().commInitRankConfig(&comm, 3, id, 0, nullptr), ncclRemoteError);
    CHECK(comm == nullptr);
    CHECK_CONTAINS(nccl().getLastError(nullptr), "rank 1 (pid ");
  });
  int joined[2];
  CHECK(pipe(joined) == 0);
  processes.start([&] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    CHECK_EQUAL(nccl().commInitRankConfig(&comm, 3, id, 1, &config), ncclInProgress);
    while (library().missingRanks(comm) != std::vector<int>{2}) std::this_thread::yield();
    CHECK(write(joined[1], "x", 1) == 1);
    pause();
  });
  char ignored;
  CHECK(read(joined[0], &ignored, 1) == 1);
  processes.kill(1);
  processes.join(0);
}

TEST(abortReleasesEveryRank) {
  threadRanks(1, [](ncclComm_t, int) {});
  const ncclUniqueId id = uniqueId();
  std::atomic<ncclComm_t> blocked{nullptr};
  threads(3, [&](int rank) {
    const ncclComm_t comm = init(id, 3, rank);
    std::vector<float> data(10);
    if (rank == 2) {
      // Another thread than the blocked one aborts.
      std::thread blockedThread([&] { CHECK_EQUAL(sum(comm, data), ncclRemoteError); });
      while (library().missingRanks(comm) != std::vector<int>{0, 1}) std::this_thread::yield();
      CHECK_NCCL(nccl().commAbort(comm));
      blockedThread.join();
      CHECK_EQUAL(sum(comm, data), ncclInvalidArgument);
      return;
    }
    // Waits for the failure without arriving.
    ncclResult_t async = ncclSuccess;
    while (async == ncclSuccess) CHECK_NCCL(nccl().commGetAsyncError(comm, &async));
    CHECK_EQUAL(async, ncclRemoteError);
    CHECK_CONTAINS(
        nccl().getLastError(comm),
        "rank 2 (pid " + std::to_string(getpid()) + ") aborted the communicator");
    CHECK_EQUAL(sum(comm, data), ncclRemoteError);
    CHECK_NCCL(nccl().commDestroy(comm));
  });
}

TEST(revokeReleasesEveryRank) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    std::vector<float> data(10);
    if (rank == 0) {
      CHECK_EQUAL(sum(comm, data), ncclRemoteError);
      CHECK_CONTAINS(nccl().getLastError(comm), "revoked");
    } else {
      while (library().missingRanks(comm) != std::vector<int>{}) {
      }
      CHECK_NCCL(nccl().commRevoke(comm, NCCL_REVOKE_DEFAULT));
      CHECK_EQUAL(nccl().commRevoke(comm, NCCL_REVOKE_DEFAULT), ncclInvalidArgument);
      ncclResult_t async = ncclInProgress;
      while (async == ncclInProgress) CHECK_NCCL(nccl().commGetAsyncError(comm, &async));
      CHECK_EQUAL(async, ncclSuccess);
      CHECK_EQUAL(sum(comm, data), ncclInvalidUsage);
      CHECK_EQUAL(nccl().commFinalize(comm), ncclInvalidArgument);
    }
  });
}

TEST(failReachesEveryRankAndTheFirstWins) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    std::vector<float> data(10);
    if (rank == 0) {
      CHECK_EQUAL(sum(comm, data), ncclTimeout);
    } else {
      CHECK_NCCL(library().fail(comm, ncclTimeout, "too late", {1}));
      CHECK_NCCL(library().fail(comm, ncclSystemError, "something else", {}));
    }
    CHECK_EQUAL(std::string(nccl().getLastError(comm)), "too late");
    CHECK_EQUAL(library().fail(comm, ncclSuccess, "", {}), ncclInvalidArgument);
  });
}

TEST(destroyedRankIsNamed) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    std::vector<float> data(10);
    CHECK_EQUAL(sum(comm, data), ncclSuccess);
    if (rank == 0) {
      CHECK_EQUAL(sum(comm, data), ncclRemoteError);
      CHECK_CONTAINS(nccl().getLastError(comm), "rank 1 destroyed its communicator");
    }
  });
}

TEST(mismatchedCollectivesFailOnEveryRank) {
  const std::vector<std::function<ncclResult_t(ncclComm_t, float*)>> calls = {
      [](ncclComm_t c, float* p) {
        return nccl().allReduce(p, p, 4, ncclFloat32, ncclSum, c, nullptr);
      },
      [](ncclComm_t c, float* p) {
        return nccl().allReduce(p, p, 5, ncclFloat32, ncclSum, c, nullptr);
      },
      [](ncclComm_t c, float* p) {
        return nccl().allReduce(p, p, 4, ncclInt32, ncclSum, c, nullptr);
      },
      [](ncclComm_t c, float* p) {
        return nccl().allReduce(p, p, 4, ncclFloat32, ncclMax, c, nullptr);
      },
      [](ncclComm_t c, float* p) {
        return nccl().allReduce(p, p, 0, ncclFloat32, ncclSum, c, nullptr);
      },
      [](ncclComm_t c, float* p) { return nccl().broadcast(p, p, 4, ncclFloat32, 0, c, nullptr); },
      [](ncclComm_t c, float* p) { return nccl().broadcast(p, p, 4, ncclFloat32, 1, c, nullptr); },
  };
  for (size_t first = 0; first < calls.size(); ++first) {
    for (size_t second = 0; second < calls.size(); ++second) {
      if (first == second) continue;
      threadRanks(2, [&](ncclComm_t comm, int rank) {
        float data[8] = {};
        // The rank that comes first to a broadcast notices at one of its next operations.
        ncclResult_t result = calls[rank == 0 ? first : second](comm, data);
        for (int i = 0; i < 3 && result == ncclSuccess; ++i) {
          result = nccl().allReduce(data, data, 4, ncclFloat32, ncclSum, comm, nullptr);
        }
        CHECK_EQUAL(result, ncclInvalidUsage);
        CHECK_CONTAINS(
            nccl().getLastError(comm), "mismatched collectives on one communicator: rank 0 calls ");
      });
    }
  }
}

// Each rank names itself as the root.
TEST(mismatchOfRootsIsAnErrorAtTheLatestAtTheEnd) {
  const std::vector<std::function<ncclResult_t(ncclComm_t, float*, int)>> calls = {
      [](ncclComm_t c, float* p, int root) {
        return nccl().broadcast(p, p, 4, ncclFloat32, root, c, nullptr);
      },
      [](ncclComm_t c, float* p, int root) {
        return nccl().reduce(p, p, 4, ncclFloat32, ncclSum, root, c, nullptr);
      },
      [](ncclComm_t c, float* p, int root) {
        return nccl().gather(p, p + 4, 4, ncclFloat32, root, c, nullptr);
      },
      [](ncclComm_t c, float* p, int root) {
        return nccl().scatter(p, p + 16, 4, ncclFloat32, root, c, nullptr);
      },
  };
  for (const int ranks : {2, 3}) {
    for (const auto& call : calls) {
      std::atomic<int> called{0}, told{0};
      threadRanks(ranks, [&](ncclComm_t comm, int rank) {
        float data[20] = {};
        ncclResult_t result = call(comm, data, rank);
        told += result == ncclInvalidUsage;
        ++called;
        while (called != ranks) std::this_thread::yield();
        CHECK(told > 0);
        if (result == ncclSuccess) result = nccl().commFinalize(comm);
        CHECK_EQUAL(result, ncclInvalidUsage);
        CHECK_CONTAINS(nccl().getLastError(comm), "root=");
      });
    }
  }
}

TEST(mismatchOfRootsIsAnErrorOfALateRank) {
  const ncclUniqueId id = uniqueId();
  std::atomic<bool> gone{false};
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    float data[4] = {};
    if (rank == 0) {
      CHECK_NCCL(nccl().broadcast(data, data, 4, ncclFloat32, 0, comm, nullptr));
      CHECK_NCCL(nccl().commDestroy(comm));
      gone = true;
      return;
    }
    while (!gone) std::this_thread::yield();
    CHECK_EQUAL(nccl().broadcast(data, data, 4, ncclFloat32, 1, comm, nullptr), ncclInvalidUsage);
    CHECK_NCCL(nccl().commDestroy(comm));
  });
}

TEST(mismatchWithABarrierNamesTheBarrier) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    CHECK_NCCL(barrier(comm));
    unsigned char one = 1;
    if (rank == 0) {
      CHECK_EQUAL(barrier(comm), ncclInvalidUsage);
    } else {
      CHECK_EQUAL(
          nccl().allReduce(&one, &one, 1, ncclUint8, ncclMax, comm, nullptr), ncclInvalidUsage);
    }
    CHECK_CONTAINS(
        nccl().getLastError(comm),
        "rank 0 calls barrier, rank 1 calls all_reduce(count=1, uint8, max)");
  });
}

TEST(mismatchIsDescribed) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    float data[4] = {};
    if (rank == 0) {
      CHECK_EQUAL(
          nccl().allReduce(data, data, 4, ncclFloat32, ncclSum, comm, nullptr), ncclInvalidUsage);
    } else {
      CHECK_EQUAL(nccl().broadcast(data, data, 4, ncclFloat32, 0, comm, nullptr), ncclInvalidUsage);
    }
    CHECK_EQUAL(
        std::string(nccl().getLastError(comm)),
        "mismatched collectives on one communicator: rank 0 calls all_reduce(count=4, float32, "
        "sum), rank 1 calls broadcast(count=4, float32, root=0)");
  });
}

TEST(forkedChildCannotUseOrDisturbTheCommunicator) {
  processRanks(2, [](ncclComm_t comm, int rank) {
    std::vector<float> data(10);
    CHECK_EQUAL(sum(comm, data), ncclSuccess);
    Processes child;
    child.start([&] {
      CHECK_EQUAL(sum(comm, data), ncclInvalidUsage);
      CHECK_CONTAINS(nccl().getLastError(nullptr), "forked");
      ncclResult_t async;
      CHECK_EQUAL(nccl().commGetAsyncError(comm, &async), ncclInvalidUsage);
      CHECK_NCCL(rank == 0 ? nccl().commAbort(comm) : nccl().commDestroy(comm));
      // It can make its own.
      const ncclComm_t own = init(uniqueId(), 1, 0);
      CHECK_EQUAL(sum(own, data), ncclSuccess);
      CHECK_NCCL(nccl().commDestroy(own));
    });
    child.joinAll();
    CHECK_EQUAL(sum(comm, data), ncclSuccess);
  });
}

TEST(aLongListOfRanksDoesNotHideTheReason) {
  using namespace torchcomms_pg::host;
  const std::string reason(200, 'r');
  std::vector<int> ranks;
  for (int rank = 0; rank < 400; rank += 2) ranks.push_back(rank);
  const auto told = decode(encode(NcclError(ncclInvalidUsage, reason, ranks), 479));
  CHECK(told);
  CHECK_EQUAL(told->result, ncclInvalidUsage);
  CHECK_EQUAL(told->what(), reason);
  CHECK(told->ranks.empty());
  const auto all = decode(encode(NcclError(ncclRemoteError, reason, ranks)));
  CHECK(all && all->ranks == ranks);
  ranks.resize(50);
  const auto few = decode(encode(NcclError(ncclRemoteError, reason, ranks), 479));
  CHECK(few && few->ranks == ranks);
  CHECK_EQUAL(few->what(), reason);
  for (const auto* const text :
       {"two lines,\nnone of them of ranks", "", "6 1", "\nno result", "a\nb", "6 1-\nb", "6  1\nb",
        "6 99999999999\nb"}) {
    CHECK(!decode(text));
  }
}

// As of a host whose 1024 ranks are missing all but one, whose failure is in the segment's record.
TEST(consecutiveRanksTakeLittleRoom) {
  using namespace torchcomms_pg::host;
  const std::vector<std::vector<int>> lists{{}, {0}, {3, 7}, {0, 1}, {5, 6, 7, 9, 11, 12}};
  for (const auto& ranks : lists) {
    const auto told = decode(encode(NcclError(ncclRemoteError, "two\nlines", ranks)));
    CHECK(told && told->ranks == ranks);
    CHECK_EQUAL(told->what(), std::string("two\nlines"));
  }
  CHECK_EQUAL(encode(NcclError(ncclSuccess, "r", {2, 0, 1, 2, 9})), "0 0-2 9\nr");
  std::vector<int> ranks;
  for (int rank = 0; rank < 1024; ++rank) {
    if (rank != 500) ranks.push_back(rank);
  }
  CHECK_EQUAL(encode(NcclError(ncclRemoteError, "r", ranks)), "6 0-499 501-1023\nr");
  CHECK(decode("6 0-2000000000\ndamaged")->ranks.size() < 2000000);
  CHECK_EQUAL(decode("6 2147483646-2147483647\ndamaged")->ranks.size(), 2u);
}

TEST(failuresAreReadWhateverTheLocaleIs) {
  using namespace torchcomms_pg::host;
  const NcclError error(ncclRemoteError, "reason", {0, 1, 2, 1000});
  for (const char separator : {' ', ',', '-'}) {
    const GroupedDigits locale(separator);
    const auto text = encode(error);
    CHECK_EQUAL(text, "6 0-2 1000\nreason");
    const auto told = decode(text);
    CHECK(told && told->ranks == error.ranks);
  }
}

TEST(aFailureIsRecordedWithItsReasonWithoutMemory) {
  using torchcomms_pg::shm::kFailureBytes;
  const std::string reason = "a reason that a short string has no room for", longer(5000, 'x');
  for (const std::string& one : {reason, longer}) {
    const auto segment = torchcomms_pg::shm::Segment::open(uniqueId(), 2);
    const torchcomms_pg::host::NcclError error(ncclSystemError, one, {1});
    memoryStaysOut = true;
    allocationsLeft = 0;
    const bool first = segment->fail(error);
    allocationsLeft = -1;
    CHECK(first);
    CHECK_EQUAL(segment->failure().result, ncclSystemError);
    CHECK_EQUAL(std::string(segment->failure().what()), one.substr(0, kFailureBytes - 12));
  }
}

TEST(textsAreCutBetweenLetters) {
  using namespace torchcomms_pg::host;
  const std::string euro = "\u20ac", head = "6\n";
  CHECK_EQUAL(euro.size(), size_t{3});
  const NcclError error(ncclRemoteError, euro + euro);
  for (size_t room = 5; room < 8; ++room) CHECK_EQUAL(encode(error, room), head + euro);
  CHECK_EQUAL(encode(error, 8), head + euro + euro);
  CHECK_EQUAL(encode(error, 4), head);
}

TEST(anOperationThatItsStreamRefusesFailsTheGroupAndDoesNotHoldUpItsEnd) {
  struct Refusing : torchcomms_pg::host::HostStream {
    void enqueue(std::function<void()>) override { throw std::runtime_error("no thread"); }
  };
  const ncclUniqueId id = uniqueId();
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    std::vector<float> data(3);
    CHECK_NCCL(sum(comm, data));
    Refusing stream;
    const auto result = nccl().allReduce(
        data.data(), data.data(), data.size(), ncclFloat32, ncclSum, comm,
        rank == 0 ? stream.handle() : nullptr);
    CHECK_EQUAL(result, ncclSystemError);
    CHECK_CONTAINS(nccl().getLastError(comm), "no thread");
    nccl().commDestroy(comm);
  });
}

TEST(whoLeavesTheQueueOfOperationsForASignalHoldsUpNobodyBehindIt) {
  static thread_local bool wanted = false;
  static const torchcomms_pg::host::InterruptSource source{
      []() noexcept { return true; }, []() noexcept { return wanted; },
      []() noexcept { return std::exception_ptr(); }};
  torchcomms_pg::host::interruptSource = &source;
  const ncclUniqueId id = uniqueId();
  std::promise<void> over;
  threads(2, [&](int rank) {
    const ncclComm_t comm = init(id, 2, rank);
    std::vector<float> data(3);
    CHECK_NCCL(sum(comm, data));
    if (rank == 1) {
      over.get_future().wait();
    } else {
      std::thread first([&] { CHECK_EQUAL(sum(comm, data), ncclRemoteError); });
      const auto ours = torchcomms_pg::shm::findHandle(comm, "this test");
      while (ours->missingRanks() != std::vector<int>{1}) std::this_thread::yield();
      void* memory = nullptr;
      CHECK_NCCL(nccl().memAlloc(&memory, 4096));
      ncclWindow_t window = nullptr;
      wanted = true;
      CHECK_EQUAL(nccl().commWindowRegister(comm, memory, 4096, &window, 0), ncclRemoteError);
      wanted = false;
      first.join();
      CHECK_CONTAINS(nccl().getLastError(comm), "interrupted by a signal");
      CHECK_NCCL(nccl().memFree(memory));
      over.set_value();
    }
    nccl().commAbort(comm);
  });
}
