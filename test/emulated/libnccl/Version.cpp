#include "libnccl/Version.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>

#include "libnccl/Misuse.hpp"

namespace emulated {

namespace {

// What the newest torch brings.
constexpr int kDefault = NCCL_VERSION(2, 30, 7);

// The last patch of each minor that has several.
constexpr std::array kMinors = {
    NCCL_VERSION(2, 18, 3), NCCL_VERSION(2, 19, 3), NCCL_VERSION(2, 21, 5),
    NCCL_VERSION(2, 24, 3), NCCL_VERSION(2, 26, 5), NCCL_VERSION(2, 27, 7),
    NCCL_VERSION(2, 28, 9), NCCL_VERSION(2, 29, 7), kDefault,
    NCCL_VERSION(2, 31, 2), NCCL_VERSION(2, 32, 3),
};

int wantedVersion() {
  const char* const text = std::getenv("EMULATED_NCCL");
  if (text == nullptr || *text == '\0') return kDefault;
  int major = 0;
  int minor = 0;
  int patch = 0;
  const int read = std::sscanf(text, "%d.%d.%d", &major, &minor, &patch);
  if (read == 3) return NCCL_VERSION(major, minor, patch);
  for (const int version : kMinors) {
    if (read == 2 && version / 100 == NCCL_VERSION(major, minor, 0) / 100) return version;
  }
  std::fprintf(
      stderr, "emulated: EMULATED_NCCL=%s: wanted 2.18 to 2.32, or such as 2.27.5\n", text);
  std::abort();
}

}  // namespace

int ncclVersion() {
  static const int version = wantedVersion();
  return version;
}

bool hasFunction(const char* function, int since) {
  if (ncclVersion() >= since) return true;
  misuse(function, "this NCCL does not have it yet");
  return false;
}

bool destroyLeavesGroupOpen() {
  const int version = ncclVersion();
  return version >= NCCL_VERSION(2, 24, 3) &&
         (version < NCCL_VERSION(2, 27, 3) || version >= NCCL_VERSION(2, 27, 6));
}

bool asyncErrorCompletesJobs() {
  return ncclVersion() >= NCCL_VERSION(2, 26, 0);
}

}  // namespace emulated
