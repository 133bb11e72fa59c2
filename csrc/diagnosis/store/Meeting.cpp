#include "diagnosis/store/Meeting.hpp"

#include <utility>
#include <vector>

#include "base/TextStreams.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg {

Meeting::Meeting(MeetingPlace place, int64_t rank)
    : place_(std::move(place)), rank_(rank), store_(JobStore::at(place_.host, place_.port)) {}

uint64_t Meeting::id() const {
  const auto text = address() + '\0' + place_.key;
  return host::hashBytes(text.data(), text.size());
}

// A line of the list is "+RANK" or "-RANK"; a rank's latest line counts.
void Meeting::append(char what) {
  const auto line = what + std::to_string(rank_) + "\n";
  store_->call([&](auto& store) {
    store.append(place_.key, std::vector<uint8_t>(line.begin(), line.end()));
  });
}

void Meeting::come() {
  LockGuard lock(mutex_);
  if (!listed_ && !left_) {
    append('+');
    listed_ = true;
  }
}

void Meeting::leave(bool joined) {
  LockGuard lock(mutex_);
  left_ = true;
  if (std::exchange(listed_, false) && !joined) {
    append('-');
  }
}

std::set<int64_t> Meeting::ranks() {
  LockGuard lock(mutex_);
  std::set<int64_t> come;
  if (!listed_) {
    return come;
  }
  const auto bytes = store_->call([&](auto& store) { return store.get(place_.key); });
  TextReader lines({bytes.begin(), bytes.end()});
  char what = 0;
  for (int64_t rank = 0; lines >> what >> rank;) {
    if (what == '+') {
      come.insert(rank);
    } else {
      come.erase(rank);
    }
  }
  return come;
}

}  // namespace torchcomms_pg
