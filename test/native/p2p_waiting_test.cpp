// Promises of who moves the messages with `done`: the threads that wait, or else the library's own.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "Messages.hpp"

using namespace test;

namespace {

constexpr size_t kOfHalfAChannel = 60'000;

void meet(ncclComm_t comm) {
  CHECK_NCCL(barrier(comm));
}

// Returns how often the library's threads for messages have gone to sleep, once all of them do.
size_t sleeps() {
  for (;; std::this_thread::yield()) {
    size_t times = 0;
    bool asleep = true;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream status(entry.path() / "status");
      std::string key, name, value;
      status >> key >> name;
      if (name != "tcpg_messages") continue;
      while (status >> key >> value) {
        if (key == "State:") asleep = asleep && value == "S";
        if (key == "voluntary_ctxt_switches:") times += std::stoul(value);
        std::getline(status, value);
      }
    }
    if (asleep) return times;
  }
}

// Messages that the caller is about to wait for, or says when it wants them.
class Deferred {
 public:
  // `confirmed`: sends end once they are received.
  explicit Deferred(ncclComm_t comm, bool confirmed = false) : comm_(comm), confirmed_(confirmed) {}

  void send(Payload& buffer, int peer, int tag = 0) {
    issue(sendTagged, message(buffer, peer, tag));
  }
  void receive(Payload& buffer, int peer, int tag = 0) {
    issue(recvTagged, message(buffer, peer, tag));
  }
  void move() {
    library().moveMessages(comm_, [this] { return completions.ended() == issued_; });
  }

  Completions completions;

 private:
  template <class Operation>
  void issue(Operation operation, Message one) {
    one.deferred = true;
    one.confirmed = confirmed_;
    ++issued_;
    CHECK_NCCL(completions.issue(operation, one, comm_));
  }

  const ncclComm_t comm_;
  const bool confirmed_;
  size_t issued_ = 0;
};

// Has the library's own thread move messages, and so start.
void serveBothWays(ncclComm_t comm, int rank) {
  Completions completions;
  Payload out = content(kLarge, rank), in(kLarge);
  CHECK_NCCL(completions.issue(sendTagged, message(out, 1 - rank), comm));
  CHECK_NCCL(completions.issue(recvTagged, message(in, 1 - rank), comm));
  completions.await();
  CHECK(in == content(kLarge, 1 - rank));
}

void waitingWakesNobody(ncclComm_t comm, int rank, size_t size, int rounds) {
  serveBothWays(comm, rank);
  meet(comm);
  const size_t before = sleeps();
  meet(comm);
  for (int round = 0; round < rounds; ++round) {
    Payload out = content(size, round), in(size);
    for (const bool sending : {rank == 0, rank == 1}) {  // there and back
      Deferred one(comm);
      sending ? one.send(out, 1 - rank) : one.receive(in, 1 - rank);
      one.move();
    }
    CHECK(in == out);
    Deferred both(comm);
    both.send(out, 1 - rank, 1);
    both.receive(in, 1 - rank, 1);
    both.move();
    both.completions.checkAll(ncclSuccess);
  }
  meet(comm);
  CHECK_EQUAL(sleeps(), before);
  meet(comm);
}

}  // namespace

TEST(threadsThatWaitForTheirMessagesWakeNoOther) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    waitingWakesNobody(comm, rank, 4, 300);
    waitingWakesNobody(comm, rank, kOfHalfAChannel, 50);
  });
}

TEST(aDeferredSendThatOnlyLacksItsConfirmationWakesNobody) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    serveBothWays(comm, rank);
    meet(comm);
    const size_t before = sleeps();
    meet(comm);
    Payload out = content(100, 1);
    Deferred one(comm, /*confirmed=*/true);
    if (rank == 0) one.send(out, 1);
    meet(comm);
    CHECK_EQUAL(sleeps(), before);
    meet(comm);
    if (rank == 1) CHECK(receive(comm, 100, 0) == out);
    one.move();
    one.completions.checkAll(ncclSuccess);
  });
}

TEST(deferredReceivesWhoseMessagesDoNotFitIntoTheChannelHoldUpNoSender) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    constexpr int kMessages = 4;
    Deferred all(comm);
    std::vector<Payload> buffers(kMessages, Payload(kOfHalfAChannel));
    for (Payload& buffer : buffers) {
      if (rank == 0) all.receive(buffer, 1);
    }
    meet(comm);
    for (int i = 0; rank == 1 && i < kMessages; ++i) send(comm, content(kOfHalfAChannel, i), 0);
    meet(comm);  // moves no messages
    if (rank == 1) return;
    all.move();
    for (int i = 0; i < kMessages; ++i) CHECK(buffers[i] == content(kOfHalfAChannel, i));
  });
}

TEST(aDeferredReceiveIsLeftAloneUntilItIsServed) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    Deferred one(comm);
    Payload in(100);
    if (rank == 0) one.receive(in, 1);
    meet(comm);
    if (rank == 1) send(comm, content(100, 1), 0);
    meet(comm);
    CHECK_EQUAL(one.completions.ended(), 0u);
    library().serveMessages(comm);
    one.completions.await();
    if (rank == 0) CHECK(in == content(100, 1));
  });
}

TEST(deferredSendsForWhichThereIsNoRoomProceedByThemselves) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    constexpr int kMessages = 5000;  // more than a channel has lines
    if (rank == 1) {
      for (int i = 0; i < kMessages; ++i) CHECK(receive(comm, 4, 0) == content(4, i));
      return;
    }
    Deferred all(comm);
    std::vector<Payload> buffers;
    for (int i = 0; i < kMessages; ++i) buffers.push_back(content(4, i));
    for (Payload& buffer : buffers) all.send(buffer, 1);
    all.completions.await();
    all.completions.checkAll(ncclSuccess);
  });
}

TEST(largeMessagesProceedWhenNobodyWaitsAnyMore) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    if (rank == 1) {
      Payload large = content(kLarge, 1);
      Deferred sent(comm);
      sent.send(large, 0, 1);
      send(comm, content(10, 2), 0, 2);
      CHECK(receive(comm, 1, 0, 3) == Payload{1});
      send(comm, content(kLarge, 4), 0, 4);
      sent.move();
      return;
    }
    Payload first(kLarge), small(10), last(kLarge);
    Deferred others(comm);
    others.receive(first, 1, 1);
    others.receive(last, 1, 4);
    Deferred waited(comm);
    waited.receive(small, 1, 2);
    waited.move();
    CHECK(small == content(10, 2));
    send(comm, {1}, 1, 3);
    others.completions.await();
    CHECK(first == content(kLarge, 1));
    CHECK(last == content(kLarge, 4));
  });
}

TEST(threadsThatWaitAtOnceEndEachOthersMessages) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    constexpr int kThreads = 3, kRounds = 100;
    threads(kThreads, [&](int tag) {
      for (int round = 0; round < kRounds; ++round) {
        const size_t size = round % 10 == 0 ? 200'000 : 8;
        Payload out = content(size, round + tag + rank), in(size);
        Deferred both(comm);
        both.receive(in, 1 - rank, tag);
        both.send(out, 1 - rank, tag);
        both.move();
        CHECK(in == content(size, round + tag + 1 - rank));
        both.completions.checkAll(ncclSuccess);
      }
    });
  });
}

TEST(anAbortReleasesAThreadThatMovesMessages) {
  for (const bool here : {true, false}) {
    const ncclUniqueId id = uniqueId();
    std::atomic<bool> waits{false}, released{false};
    threads(2, [&](int rank) {
      const ncclComm_t comm = init(id, 2, rank);
      if (rank == 1) {
        while (!(here ? released : waits)) std::this_thread::yield();
        CHECK_NCCL(nccl().commAbort(comm));
        return;
      }
      Payload never(8);
      Deferred one(comm);
      one.receive(never, 1);
      std::thread waiting([&] {
        waits = true;
        one.move();
      });
      while (here && !waits) std::this_thread::yield();
      if (here) CHECK_NCCL(nccl().commAbort(comm));
      waiting.join();
      one.completions.await();
      one.completions.checkAll(ncclRemoteError);
      released = true;
      if (!here) CHECK_NCCL(nccl().commAbort(comm));
    });
  }
}
