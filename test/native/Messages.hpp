// Sending and receiving in tests.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "Allocations.hpp"
#include "Ranks.hpp"

namespace test {

using torchcomms_pg::kAnyPeer;
using torchcomms_pg::Message;

using Body = std::function<void(ncclComm_t, int)>;

// Runs `body` with each of the numbers of ranks, with processes first: they are forked before this
// one has threads.
inline void everywhere(const std::vector<int>& worlds, const Body& body) {
  for (const int ranks : worlds) processRanks(ranks, body);
  for (const int ranks : worlds) threadRanks(ranks, body);
}

// Counts the calls of `done` of a set of messages.
class Completions {
 public:
  struct One {
    Completions* owner;
    bool refused = false;
    int calls = 0;
    ncclResult_t result = ncclSuccess;
    int peer = -2;
  };

  One* expect(Message& message) {
    std::lock_guard lock(mutex_);
    all_.push_back(std::make_unique<One>(One{.owner = this}));
    message.done = &called;
    message.context = all_.back().get();
    return all_.back().get();
  }
  // Sends or receives a message that the library may refuse, and returns its answer.
  template <class Operation>
  ncclResult_t issue(Operation operation, Message message, ncclComm_t comm) {
    const int allocations = std::exchange(allocationsLeft, -1);
    One* const one = expect(message);
    allocationsLeft = allocations;
    const ncclResult_t result = operation(message, comm, nullptr);
    std::lock_guard lock(mutex_);
    one->refused = result != ncclSuccess;
    return result;
  }
  // Waits for the ends of all messages, of which none was refused.
  void await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ == all_.size(); });
  }
  size_t ended() {
    std::lock_guard lock(mutex_);
    return ended_;
  }
  void checkAll(ncclResult_t result) {
    checkEnded();
    std::lock_guard lock(mutex_);
    for (const auto& one : all_) CHECK_EQUAL(one->result, result);
  }
  // Checks, once none is under way, that each message has ended once, and none that was refused.
  void checkEnded() {
    std::lock_guard lock(mutex_);
    for (const auto& one : all_) CHECK_EQUAL(one->calls, one->refused ? 0 : 1);
  }

 private:
  static void called(void* context, ncclResult_t result, int peer) noexcept {
    One& one = *static_cast<One*>(context);
    Completions& owner = *one.owner;
    std::lock_guard lock(owner.mutex_);
    one.result = result;
    one.peer = peer;
    if (one.calls++ == 0) ++owner.ended_;
    owner.changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<One>> all_;
  size_t ended_ = 0;
};

using Payload = std::vector<unsigned char>;

inline Payload content(size_t size, uint64_t seed) {
  Payload buffer(size);
  const uint64_t start = seed * 11;
  for (size_t i = 0; i < size; ++i) buffer[i] = static_cast<unsigned char>(start + i * 7 + i / 251);
  return buffer;
}

inline Message message(Payload& buffer, int peer, int tag = 0) {
  return {
      .buffer = buffer.data(), .count = buffer.size(), .type = ncclUint8, .peer = peer, .tag = tag};
}

inline void send(ncclComm_t comm, Payload buffer, int peer, int tag = 0) {
  CHECK_NCCL(sendTagged(message(buffer, peer, tag), comm, nullptr));
}

inline Payload receive(ncclComm_t comm, size_t size, int peer, int tag = 0) {
  Payload buffer(size);
  CHECK_NCCL(recvTagged(message(buffer, peer, tag), comm, nullptr));
  return buffer;
}

inline int sizeOf(ncclComm_t comm) {
  int ranks = 0;
  CHECK_NCCL(nccl().commCount(comm, &ranks));
  return ranks;
}

inline std::string errorOf(ncclComm_t comm) {
  return nccl().getLastError(comm);
}

inline constexpr size_t kLarge = 3'000'000;  // more than any channel holds

}  // namespace test
