// The steps in which collectives move data: every rank publishes one staging buffer and reads its
// peers' buffers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shm/segment/Segment.hpp"
#include "shm/segment/Wait.hpp"

namespace torchcomms_pg::shm {

// This rank's side of the steps. All ranks execute the same steps in the same order. A rank may
// open and publish a step before it has closed the previous step. Any thread may call
// missingRanks(); the other functions are for the thread whose ticket is next (TicketLock).
class Exchange {
 public:
  Exchange(Segment& segment, const Waiter& waiter, int self)
      : segment_(segment), waiter_(waiter), self_(self) {}

  // Sets the signature of the collective to which the next steps belong. `rooted` is true if some
  // ranks do not read from all others: read() would miss some mismatches, so publish() compares
  // signatures, too.
  void begin(const Signature& signature, bool rooted = false) {
    signature_ = signature;
    rooted_ = rooted;
  }

  // Blocks until no peer reads the previous content of the next step's buffer, and returns the
  // buffer. Throws NcclError.
  std::byte* open();
  // Returns whether open() would return without waiting.
  bool hasRoom() const;
  // Publishes the opened buffer. In a rooted collective, throws NcclError if a peer has published
  // the step for a different collective; the communicator has then failed on every rank.
  void publish();

  // Blocks until `peer` has published the oldest step that this rank has not closed, and returns
  // the peer's buffer. Throws NcclError, for example if the peer has published a different
  // collective.
  const std::byte* read(int peer);

  // Returns this rank's buffer of the oldest step that it has not closed.
  const std::byte* mine() const {
    return segment_.staging(self_, closed_.load(std::memory_order_relaxed));
  }

  // Closes the oldest unclosed step: this rank no longer reads the step's buffers.
  void close();

  // Does one step in which every rank publishes `mine`, and returns what they have published, by
  // rank. Throws NcclError.
  template <class T>
  std::vector<T> gather(const T& mine) {
    std::memcpy(open(), &mine, sizeof mine);
    publish();
    std::vector<T> all(segment_.size(), mine);
    for (int rank = 0; rank < segment_.size(); ++rank) {
      if (rank != self_) std::memcpy(&all[rank], read(rank), sizeof mine);
    }
    close();
    return all;
  }

  // Returns the ranks that have not published the oldest unclosed step.
  std::vector<int> missingRanks() const;

  // Compares signatures of the last kDepth steps, which no later open() will compare, with peers
  // that have published the steps. Does not wait. Throws NcclError if they differ.
  void checkLastSteps();

 private:
  void check(int peer, uint64_t step);
  void checkArrived(uint64_t step);

  Segment& segment_;
  const Waiter& waiter_;
  const int self_;
  Signature signature_{};
  bool rooted_ = false;
  uint64_t opened_ = 0;
  uint64_t published_ = 0;
  std::atomic<uint64_t> closed_{0};
};

}  // namespace torchcomms_pg::shm
