#include "host/NcclError.hpp"

#include <set>
#include <sstream>

namespace torchcomms_pg::host {

namespace {

// Limit of the number of ranks, in case a text is damaged.
constexpr size_t kMostRanks = 1 << 20;

}  // namespace

std::string encode(const NcclError& error, size_t room) {
  const std::set<int> ranks(error.ranks.begin(), error.ranks.end());
  std::string listed;
  for (auto rank = ranks.begin(); rank != ranks.end();) {
    const int first = *rank;
    int last = first;
    while (++rank != ranks.end() && *rank == last + 1) ++last;
    listed += " " + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
  }
  if (listed.size() > room / 2) listed.clear();
  auto text = std::to_string(error.result) + listed + "\n" + error.what();
  if (text.size() > room) {
    while (room > 0 && (text[room] & 0xc0) == 0x80) --room;
    text.resize(room);
  }
  return text;
}

std::optional<NcclError> decode(const std::string& text) {
  const auto end = text.find('\n');
  std::istringstream in(text.substr(0, end));
  int result = 0;
  if (end == std::string::npos || text.find_first_not_of("0123456789- ") != end ||
      !(in >> result)) {
    return std::nullopt;
  }
  std::vector<int> ranks;
  for (int rank = 0; in >> rank;) {
    int last = rank;
    if (in.peek() == '-') in.ignore() >> last;
    for (; rank <= last && ranks.size() < kMostRanks; ++rank) ranks.push_back(rank);
  }
  return NcclError(static_cast<ncclResult_t>(result), text.substr(end + 1), std::move(ranks));
}

}  // namespace torchcomms_pg::host
