// Matches receives with messages.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "shm/message/Transfer.hpp"

namespace torchcomms_pg::shm {

// Keeps receives that have no message yet, and messages that have no receive yet. Such a message is
// a Transfer, too: the send, if this rank sends to itself, or else a receive without a buffer,
// whose `peer` is the source. Messages of one source and tag are matched in the order of arrival.
// Receives are matched in the order of post(), whether they name a source or not. Not thread-safe.
class Matcher {
 public:
  explicit Matcher(int ranks) : posted_(ranks) {}

  // Removes and returns the held message that `receive` matches. If no message matches, posts the
  // receive and returns null.
  std::shared_ptr<Transfer> post(const std::shared_ptr<Transfer>& receive);

  // Removes and returns the posted receive that a new message matches, or null if none does.
  std::shared_ptr<Transfer> take(int source, int tag);

  // Holds a message for which take() returned null.
  void hold(const std::shared_ptr<Transfer>& message) { held_.push_back(message); }

  // Removes a posted receive. Returns false if the receive is not posted, for example because
  // take() has returned it.
  bool cancel(const Transfer& receive);

  // Notes that a posted receive has been started.
  void noteStarted(const Transfer& receive);

  // Returns whether a started receive could take a message from `source`.
  bool awaited(int source) const { return posted_[source].started > 0 || any_.started > 0; }

  // Calls look() with each posted receive.
  template <class Look>
  void forPosted(const Look& look) const {
    for (const Posted& posted : posted_) std::ranges::for_each(posted.receives, look);
    std::ranges::for_each(any_.receives, look);
  }

 private:
  struct Posted {
    std::deque<std::shared_ptr<Transfer>> receives;
    int started = 0;
  };
  Posted& postedFor(const Transfer& receive);

  std::vector<Posted> posted_;  // by source
  Posted any_;
  std::deque<std::shared_ptr<Transfer>> held_;  // in order of arrival
};

}  // namespace torchcomms_pg::shm
