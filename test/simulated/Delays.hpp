// Delays of streams before an operation. Knows nothing of torch.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>

namespace simulated {

struct Delays {
  uint64_t seed = 0;
  double probability = 0;
  std::chrono::microseconds longest{0};
};

// Sets the delays of all streams, from their next operation on.
void setDelays(const Delays& delays);

// The delays of one stream, which depend on the seed and its number. For one thread at a time.
class Dawdler {
 public:
  explicit Dawdler(uint64_t stream) : stream_(stream) {}

  void dawdle();

 private:
  const uint64_t stream_;
  uint64_t generation_ = 0;  // number of the delays that random_ was seeded for
  std::mt19937_64 random_;
};

}  // namespace simulated
