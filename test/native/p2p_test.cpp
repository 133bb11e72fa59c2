// Promises of sends and receives while nothing fails.
#include <map>
#include <memory>
#include <random>
#include <utility>

#include "Messages.hpp"
#include "Streams.hpp"
#include "shm/message/Channel.hpp"

using namespace test;

namespace {

// The messages from one rank to another: both ends compute the same list.
struct Planned {
  size_t size;
  int tag;
  uint64_t seed;
};

std::vector<Planned> planned(int source, int destination, int count) {
  std::mt19937 generator(1000 * source + destination);
  std::vector<Planned> list;
  for (int i = 0; i < count; ++i) {
    const size_t most = size_t{1} << generator() % 20;  // up to several channels' worth
    list.push_back({generator() % most, static_cast<int>(generator() % 3), generator()});
  }
  return list;
}

// Sends from every rank to every other and itself, all at once, interleaving the peers at random.
void storm(ncclComm_t comm, int rank) {
  constexpr int kMessages = 60;
  const int ranks = sizeOf(comm);
  struct Flow {
    bool sending;
    int peer;
    std::vector<Planned> list;
    size_t next = 0;
  };
  std::vector<Flow> flows;
  for (int peer = 0; peer < ranks; ++peer) {
    flows.push_back({true, peer, planned(rank, peer, kMessages)});
    flows.push_back({false, peer, planned(peer, rank, kMessages)});
  }
  Completions completions;
  std::vector<std::unique_ptr<Payload>> sent;
  std::vector<std::pair<std::unique_ptr<Payload>, uint64_t>> received;
  std::mt19937 generator(rank);
  while (!flows.empty()) {
    const size_t index = generator() % flows.size();
    Flow& flow = flows[index];
    const Planned plan = flow.list[flow.next];
    auto buffer = std::make_unique<Payload>(
        flow.sending ? content(plan.size, plan.seed) : Payload(plan.size));
    Message one = message(*buffer, flow.peer, plan.tag);
    if (flow.sending) {
      one.confirmed = generator() % 2;
      CHECK_NCCL(completions.issue(sendTagged, one, comm));
      sent.push_back(std::move(buffer));
    } else {
      CHECK_NCCL(completions.issue(recvTagged, one, comm));
      received.emplace_back(std::move(buffer), plan.seed);
    }
    if (++flow.next == flow.list.size()) flows.erase(flows.begin() + index);
  }
  completions.await();
  completions.checkAll(ncclSuccess);
  for (const auto& [buffer, seed] : received) CHECK(*buffer == content(buffer->size(), seed));
}

void groups(ncclComm_t comm, int rank) {
  const int ranks = sizeOf(comm);
  for (const size_t size : {0ul, 1ul, 4095ul, 300'001ul, 2'000'003ul}) {
    std::vector<Payload> out, in;
    for (int peer = 0; peer < ranks; ++peer) {
      out.push_back(content(size, 10 * rank + peer));
      in.emplace_back(size);
    }
    CHECK_NCCL(nccl().groupStart());
    for (int peer = 0; peer < ranks; ++peer) {
      CHECK_NCCL(nccl().send(out[peer].data(), size, ncclUint8, peer, comm, nullptr));
      CHECK_NCCL(nccl().recv(in[peer].data(), size, ncclUint8, peer, comm, nullptr));
    }
    CHECK_NCCL(nccl().groupEnd());
    for (int peer = 0; peer < ranks; ++peer) CHECK(in[peer] == content(size, 10 * peer + rank));
  }
}

// Checks that the message of tag 0 passes those that have been received before it, into memory of
// the receiver.
void confirmed(ncclComm_t comm, int rank) {
  for (const size_t size : {size_t{0}, size_t{100}, kLarge}) {
    if (rank == 1) {
      CHECK(receive(comm, 3, 0, 1) == content(3, 1));
      send(comm, content(3, 2), 0, 2);
      CHECK(receive(comm, 3, 0, 3) == content(3, 3));
      CHECK(receive(comm, size, 0) == content(size, size));
      continue;
    }
    Completions completions;
    Payload buffer = content(size, size);
    Message one = message(buffer, 1);
    one.confirmed = true;
    CHECK_NCCL(completions.issue(sendTagged, one, comm));
    send(comm, content(3, 1), 1, 1);
    CHECK(receive(comm, 3, 1, 2) == content(3, 2));
    CHECK_EQUAL(completions.ended(), 0u);
    send(comm, content(3, 3), 1, 3);
    completions.await();
    completions.checkAll(ncclSuccess);
  }
}

void confirmedBackwards(ncclComm_t comm, int rank) {
  constexpr int kMessages = 3 * torchcomms_pg::shm::kSlots;
  Completions completions;
  std::vector<Payload> buffers;
  for (int tag = 0; tag < kMessages; ++tag) {
    buffers.push_back(rank == 0 ? content(9, tag) : Payload(9));
    const int next = rank == 0 ? tag : kMessages - 1 - tag;
    if (rank == 1) {
      CHECK(receive(comm, 9, 0, next) == content(9, next));
      continue;
    }
    Message one = message(buffers.back(), 1, next);
    one.confirmed = true;
    CHECK_NCCL(completions.issue(sendTagged, one, comm));
  }
  completions.await();
  completions.checkAll(ncclSuccess);
}

}  // namespace

TEST_WITHIN(messagesOfAllPairsAtOnceArriveIntact, 120) {
  everywhere({1, 2, 4}, storm);
}

TEST(aConfirmedSendEndsOnceItsMessageHasBeenReceived) {
  everywhere({2}, confirmed);
}

TEST(moreConfirmedMessagesThanHaveSlotsArriveInAnyOrder) {
  everywhere({2}, confirmedBackwards);
}

TEST_WITHIN(groupsExchangeWithEveryRank, 60) {
  everywhere({1, 2, 3, 4}, groups);
}

TEST(messagesMixWithCollectives) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    for (int round = 0; round < 200; ++round) {
      Completions completions;
      Payload out = content(5000 + 100 * round, round), in(out.size());
      CHECK_NCCL(completions.issue(sendTagged, message(out, 1 - rank, 1), comm));
      CHECK_NCCL(completions.issue(recvTagged, message(in, 1 - rank, 1), comm));
      float sum = 1;
      CHECK_NCCL(nccl().allReduce(&sum, &sum, 1, ncclFloat32, ncclSum, comm, nullptr));
      CHECK_EQUAL(sum, 2.0f);
      if (rank == 0) send(comm, content(round, 5), 1);
      if (rank == 1) CHECK(receive(comm, round, 0) == content(round, 5));
      completions.await();
      completions.checkAll(ncclSuccess);
      CHECK(in == content(in.size(), round));
    }
  });
}

TEST(anySourceTakesEachMessageOnceAndNamesItsSender) {
  everywhere({4}, [](ncclComm_t comm, int rank) {
    constexpr int kEach = 50;
    if (rank != 0) {
      for (int i = 0; i < kEach; ++i) send(comm, {(unsigned char)rank, (unsigned char)i}, 0, 7);
      return;
    }
    Completions completions;
    std::vector<Payload> buffers(3 * kEach, Payload(2));
    std::vector<Completions::One*> ones;
    for (Payload& buffer : buffers) {
      Message any = message(buffer, kAnyPeer, 7);
      ones.push_back(completions.expect(any));
      CHECK_NCCL(recvTagged(any, comm, nullptr));
    }
    completions.await();
    completions.checkAll(ncclSuccess);
    std::map<int, int> next;
    for (size_t i = 0; i < buffers.size(); ++i) {
      CHECK_EQUAL(ones[i]->peer, int(buffers[i][0]));
      CHECK_EQUAL(int(buffers[i][1]), next[ones[i]->peer]++);
    }
  });
}

TEST(receivesMatchInTheOrderOfIssueNoMatterWhetherTheyNameTheSource) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    if (rank == 0) {
      for (unsigned char i = 0; i < 4; ++i) send(comm, {i}, 1, 3);
      return;
    }
    Completions completions;
    std::vector<Payload> buffers(4, Payload(1));
    for (int i = 0; i < 4; ++i) {
      const Message one = message(buffers[i], i % 2 == 0 ? kAnyPeer : 0, 3);
      CHECK_NCCL(completions.issue(recvTagged, one, comm));
    }
    completions.await();
    for (int i = 0; i < 4; ++i) CHECK_EQUAL(int(buffers[i][0]), i);
  });
}

TEST(aTagPassesLargeMessagesOfOtherTags) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    if (rank == 0) {
      Completions completions;
      Payload large = content(kLarge, 1);
      CHECK_NCCL(completions.issue(sendTagged, message(large, 1, 1), comm));
      send(comm, content(10, 2), 1, 2);
      completions.await();
    } else {
      CHECK(receive(comm, 10, 0, 2) == content(10, 2));
      CHECK(receive(comm, kLarge, 0, 1) == content(kLarge, 1));
    }
  });
}

TEST(aPeerThatDoesNotReceiveDelaysNoOther) {
  everywhere({3}, [](ncclComm_t comm, int rank) {
    if (rank == 0) {
      Completions stuck;
      Payload large = content(kLarge, 1);
      CHECK_NCCL(stuck.issue(sendTagged, message(large, 1), comm));
      send(comm, content(kLarge, 2), 2);
      CHECK(receive(comm, kLarge, 2) == content(kLarge, 3));
      CHECK_EQUAL(stuck.ended(), 0u);
      send(comm, {1}, 2, 9);
      send(comm, {1}, 1, 9);  // behind the large one, but of another tag
      stuck.await();
    } else if (rank == 1) {
      CHECK(receive(comm, 1, 2, 9) == Payload{1});
      CHECK(receive(comm, kLarge, 0) == content(kLarge, 1));
      CHECK(receive(comm, 1, 0, 9) == Payload{1});
    } else {
      CHECK(receive(comm, kLarge, 0) == content(kLarge, 2));
      send(comm, content(kLarge, 3), 0);
      CHECK(receive(comm, 1, 0, 9) == Payload{1});  // rank 0 has looked
      send(comm, {1}, 1, 9);
    }
  });
}

TEST(anOperationThatItsStreamHoldsBackDelaysNoOtherTag) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    LaterStream stream;
    Payload held = rank == 0 ? content(kLarge, 1) : Payload(kLarge);
    const Message one = message(held, 1 - rank, 1);
    if (rank == 0) {
      CHECK_NCCL(sendTagged(one, comm, stream.handle()));
      send(comm, content(kLarge, 2), 1, 2);
      send(comm, content(kLarge, 3), 1, 3);
      stream.run();
      CHECK(receive(comm, 1, 1) == Payload{1});
    } else {
      CHECK_NCCL(recvTagged(one, comm, stream.handle()));
      CHECK(receive(comm, kLarge, 0, 3) == content(kLarge, 3));
      CHECK(receive(comm, kLarge, 0, 2) == content(kLarge, 2));
      stream.run();
      CHECK(held == content(kLarge, 1));
      send(comm, {1}, 0);
    }
  });
}

TEST(messagesOfOneTagKeepTheOrderOfIssueAcrossStreams) {
  everywhere({2}, [](ncclComm_t comm, int rank) {
    LaterStream stream;
    Completions completions;
    Payload held = rank == 0 ? content(100, 1) : Payload(100);
    Payload free = rank == 0 ? content(100, 2) : Payload(100);
    const auto operation = rank == 0 ? sendTagged : recvTagged;
    CHECK_NCCL(operation(message(held, 1 - rank, 1), comm, stream.handle()));
    CHECK_NCCL(completions.issue(operation, message(free, 1 - rank, 1), comm));
    stream.run();
    completions.await();
    CHECK(held == content(100, 1));
    CHECK(free == content(100, 2));
  });
}

TEST(aRankSendsToItself) {
  threadRanks(1, [](ncclComm_t comm, int) {
    for (const bool sendFirst : {true, false}) {
      Completions completions;
      Payload out = content(kLarge, 1), in(kLarge);
      const auto send = [&] { CHECK_NCCL(completions.issue(sendTagged, message(out, 0), comm)); };
      if (sendFirst) send();
      const Message incoming = message(in, sendFirst ? kAnyPeer : 0);
      CHECK_NCCL(completions.issue(recvTagged, incoming, comm));
      if (!sendFirst) send();
      completions.await();
      completions.checkAll(ncclSuccess);
      CHECK(in == out);
    }
    Payload alone(4);
    CHECK_EQUAL(sendTagged(message(alone, 0), comm, nullptr), ncclInvalidUsage);
    CHECK_CONTAINS(errorOf(comm), "itself");
  });
}

TEST(absentRanksNamesWhomARecvWaitsFor) {
  threadRanks(3, [](ncclComm_t comm, int rank) {
    if (rank == 2) {
      receive(comm, 1, 0, 1);
      send(comm, {1}, 0);
    } else if (rank == 0) {
      std::thread waiting([&] { receive(comm, 1, 2); });
      while (library().missingRanks(comm) != std::vector<int>{2}) std::this_thread::yield();
      send(comm, {1}, 2, 1);
      waiting.join();
      CHECK(library().missingRanks(comm).empty());
    }
  });
}
