#include "host/NcclError.hpp"

#include <charconv>
#include <set>
#include <system_error>

namespace torchcomms_pg::host {

namespace {

// Limit of the number of ranks that decode() returns, since a damaged text may name too many.
constexpr size_t kMostRanks = 1 << 20;

// Reads a number at the beginning of [at, end), in any locale, and moves `at` behind it. Returns
// false if [at, end) does not begin with a number.
bool read(const char*& at, const char* end, int& number) {
  const auto [next, error] = std::from_chars(at, end, number);
  at = next;
  return error == std::errc();
}

bool skip(const char*& at, const char* end, char expected) {
  const bool found = at != end && *at == expected;
  at += found;
  return found;
}

}  // namespace

size_t wholeCharacters(std::string_view text, size_t room) {
  if (text.size() <= room) return text.size();
  while (room > 0 && (text[room] & 0xc0) == 0x80) --room;
  return room;
}

std::string encode(const NcclError& error, size_t room) {
  const std::set<int> ranks(error.ranks.begin(), error.ranks.end());
  std::string listed;
  for (auto rank = ranks.begin(); rank != ranks.end();) {
    const int first = *rank;
    int last = first;
    while (++rank != ranks.end() && *rank == last + 1) ++last;
    listed += " " + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
  }
  // A shortened list would say that the ranks it lacks are not at fault.
  if (listed.size() > room / 2) listed.clear();
  auto text = std::to_string(error.result) + listed + "\n";
  text.append(error.what(), wholeCharacters(error.what(), room - text.size()));
  return text;
}

std::optional<NcclError> decode(const std::string& text) {
  const auto line = text.find('\n');
  if (line == std::string::npos) return std::nullopt;
  const char* at = text.data();
  const char* const end = at + line;
  int result = 0;
  if (!read(at, end, result)) return std::nullopt;
  std::vector<int> ranks;
  while (at != end) {
    int first = 0;
    if (!skip(at, end, ' ') || !read(at, end, first)) return std::nullopt;
    int last = first;
    if (skip(at, end, '-') && !read(at, end, last)) return std::nullopt;
    for (int64_t rank = first; rank <= last && ranks.size() < kMostRanks; ++rank) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return NcclError(static_cast<ncclResult_t>(result), text.substr(line + 1), std::move(ranks));
}

}  // namespace torchcomms_pg::host
