#include "host/FailureText.hpp"

#include <sstream>
#include <utility>
#include <vector>

namespace torchcomms_pg::host {

std::string cut(const std::string& text, size_t room) {
  if (text.size() <= room) return text;
  size_t length = room;
  while (length > 0 && (text[length] & 0xc0) == 0x80) --length;
  return text.substr(0, length);
}

std::string encode(const NcclError& failure, size_t room) {
  std::string ranks;
  for (const int rank : failure.ranks) {
    ranks += std::to_string(rank) + " ";
  }
  if (ranks.size() > room / 2) ranks.clear();
  return cut(ranks + "\n" + failure.what(), room);
}

std::optional<NcclError> decode(const std::string& text) {
  const auto end = text.find('\n');
  if (end == std::string::npos || text.find_first_not_of("0123456789 ") != end) {
    return std::nullopt;
  }
  std::vector<int> ranks;
  std::istringstream in(text.substr(0, end));
  for (int rank = 0; in >> rank;) {
    ranks.push_back(rank);
  }
  return NcclError(ncclRemoteError, text.substr(end + 1), std::move(ranks));
}

}  // namespace torchcomms_pg::host
