// Numbers and lists in texts for people.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/TextStreams.hpp"

namespace torchcomms_pg {

// Returns a duration that a program has set, such as a timeout, as "0.25 s".
inline std::string inSeconds(std::chrono::milliseconds duration) {
  TextWriter out;
  out << static_cast<double>(duration.count()) / 1000.0 << " s";
  return out.str();
}

// Returns a measured duration to a tenth of a second, or "40 ms" if it is shorter than that.
inline std::string aboutSeconds(int64_t milliseconds) {
  return milliseconds < 100 ? std::to_string(milliseconds) + " ms"
                            : inSeconds(std::chrono::milliseconds(milliseconds / 100 * 100));
}

// Returns "0, 2, 5".
template <class Rank>
std::string joinRanks(const std::vector<Rank>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

// Returns "rank 3", or "ranks 0, 2, 5".
template <class Rank>
std::string namedRanks(const std::vector<Rank>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + joinRanks(ranks);
}

}  // namespace torchcomms_pg
