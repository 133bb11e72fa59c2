// The steps in which collectives move data: every rank publishes one staging buffer and reads its
// peers' buffers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "shm/segment/Segment.hpp"
#include "shm/segment/Wait.hpp"

namespace torchcomms_pg::shm {

// This rank's side of the steps. All ranks execute the same steps in the same order; a step may be
// opened and published before the step before it is closed. Used only by the thread whose turn it
// is, except missingRanks().
class Exchange {
 public:
  Exchange(Segment& segment, const Waiter& waiter, int self)
      : segment_(segment), waiter_(waiter), self_(self) {}

  // Sets the collective that the next steps belong to. `rooted`: not every rank reads from every
  // other, so read() would miss some mismatches, and publish() compares signatures as well.
  void begin(const Signature& signature, bool rooted = false) {
    signature_ = signature;
    rooted_ = rooted;
  }

  // Returns the buffer of the next step, once no peer reads its previous content.
  std::byte* open();
  // Returns whether open() would return without waiting.
  bool hasRoom() const;
  // Publishes the opened buffer. Throws NcclError if a peer has published a different collective:
  // the later of two ranks throws, in publish() or read(), and the other one sees the failure.
  void publish();

  // Returns a peer's buffer of the oldest unclosed step, once published.
  const std::byte* read(int peer);

  // Returns this rank's buffer of that step.
  const std::byte* mine() const {
    return segment_.staging(self_, closed_.load(std::memory_order_relaxed));
  }

  // Closes the oldest unclosed step: this rank reads nothing more of it.
  void close();

  size_t bytes() const { return kStagingBytes; }

  // Returns the ranks that have not published the oldest unclosed step.
  std::vector<int> missingRanks() const;

  // Compares the signatures that no later open() will compare, as far as possible without waiting.
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
