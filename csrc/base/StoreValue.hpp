// Reading and claiming a key of the group's store without waiting, in one round trip.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace torchcomms_pg {

// Returns the key's value, or nullopt if the key does not exist. Reads by a comparison that never
// matches: for a missing key every store returns the expected value. check() and get() would take
// two round trips more, and get() would wait if another rank erased the key after check().
inline std::optional<std::string> valueOf(c10d::Store& store, const std::string& key) {
  static const std::string text = "torchcomms_pg: no value";
  static const std::vector<uint8_t> none(text.begin(), text.end());
  std::vector<uint8_t> value;
  try {
    value = store.compareSet(key, none, none);
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error&) {  // a store that is written in Python has no compareSet()
    value = store.check({key}) ? store.get(key) : none;
  }
  return value == none ? std::nullopt : std::optional<std::string>({value.begin(), value.end()});
}

// Sets the key if it does not exist. Returns the value that the key then has, which is the same for
// all callers.
inline std::string claimIn(c10d::Store& store, const std::string& key, const std::string& value) {
  const std::vector<uint8_t> wanted(value.begin(), value.end());
  std::vector<uint8_t> found;
  try {
    found = store.compareSet(key, {}, wanted);
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::Error&) {  // as in valueOf(); two callers may then both set the key
    if (store.check({key})) {
      found = store.get(key);
    } else {
      store.set(key, wanted);
      found = wanted;
    }
  }
  return {found.begin(), found.end()};
}

// The pauses of a rank that polls the store instead of waiting: a store prints a warning for each
// wait that times out. The pauses grow, up to a limit that rises with the number of ranks that poll
// at the same time, since one process answers all of them.
class StorePauses {
 public:
  explicit StorePauses(int64_t ranks) : longest_(longestOf(ranks)) {}

  void next() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ + pause_ / 4, longest_);
  }

  static std::chrono::microseconds longestOf(int64_t ranks) {
    return std::max(kLongest, ranks * kOfRank);
  }

 private:
  static constexpr std::chrono::microseconds kFirst{200};
  static constexpr std::chrono::microseconds kLongest{20'000};
  static constexpr std::chrono::microseconds kOfRank{100};

  const std::chrono::microseconds longest_;
  std::chrono::microseconds pause_ = kFirst;
};

}  // namespace torchcomms_pg
