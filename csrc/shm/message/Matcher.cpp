#include "shm/message/Matcher.hpp"

#include "nccl/Library.hpp"

namespace torchcomms_pg::shm {

Matcher::Posted& Matcher::postedFor(const Transfer& receive) {
  return receive.peer == kAnyPeer ? any_ : posted_[receive.peer];
}

std::shared_ptr<Transfer> Matcher::post(const std::shared_ptr<Transfer>& receive) {
  const auto found = std::find_if(held_.begin(), held_.end(), [&](const auto& message) {
    return message->tag == receive->tag &&
           (receive->peer == kAnyPeer || receive->peer == message->peer);
  });
  if (found == held_.end()) {
    postedFor(*receive).receives.push_back(receive);
    return nullptr;
  }
  auto message = *found;
  held_.erase(found);
  return message;
}

std::shared_ptr<Transfer> Matcher::take(int source, int tag) {
  const auto find = [tag](Posted& posted) {
    return std::find_if(posted.receives.begin(), posted.receives.end(), [tag](const auto& receive) {
      return receive->tag == tag;
    });
  };
  Posted* from = &posted_[source];
  auto first = find(*from);
  if (const auto any = find(any_); any != any_.receives.end()) {
    if (first == from->receives.end() || (*any)->order < (*first)->order) {
      from = &any_;
      first = any;
    }
  }
  if (first == from->receives.end()) return nullptr;
  auto receive = *first;
  from->receives.erase(first);
  if (receive->started) --from->started;
  return receive;
}

bool Matcher::cancel(const Transfer& receive) {
  Posted& posted = postedFor(receive);
  const auto found =
      std::ranges::find(posted.receives, &receive, [](const auto& entry) { return entry.get(); });
  if (found == posted.receives.end()) return false;
  if (receive.started) --posted.started;
  posted.receives.erase(found);
  return true;
}

void Matcher::noteStarted(const Transfer& receive) {
  ++postedFor(receive).started;
}

}  // namespace torchcomms_pg::shm
