#include "diagnosis/store/Meeting.hpp"

#include <cstdlib>
#include <utility>
#include <vector>

#include "host/Process.hpp"

namespace torchcomms_pg {

namespace {

constexpr char kComes = '+';
constexpr char kLeaves = '-';

}  // namespace

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
    append(kComes);
    listed_ = true;
  }
}

void Meeting::leave(bool joined) {
  LockGuard lock(mutex_);
  left_ = true;
  if (std::exchange(listed_, false) && !joined) {
    append(kLeaves);
  }
}

std::set<int64_t> Meeting::ranks() {
  LockGuard lock(mutex_);
  std::set<int64_t> come;
  if (!listed_) {
    return come;
  }
  const auto bytes = store_->call([&](auto& store) { return store.get(place_.key); });
  const std::string text(bytes.begin(), bytes.end());
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    const auto rank = std::atoll(text.c_str() + begin + 1);
    if (text[begin] == kComes) {
      come.insert(rank);
    } else {
      come.erase(rank);
    }
    begin = end + 1;
  }
  return come;
}

}  // namespace torchcomms_pg
