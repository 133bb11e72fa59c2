// An operator new that fails in some threads on a test's request. Preloaded, it replaces
// libstdc++'s for the process.
#include <dlfcn.h>
#include <sys/prctl.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

// Allocations are counted in threads whose names begin with `begin`; one, by its number, fails.
char begin[16];
constexpr long kNotCounted = -(1L << 40);
std::atomic<long> failing{0};
std::atomic<long> count{kNotCounted};

// Torch's own allocations are not counted: its client of a store cannot be used after such an
// error, since it leaves an answer half read.
bool isTorch(const void* caller) {
  Dl_info found{};
  return dladdr(caller, &found) != 0 && (std::strstr(found.dli_fname, "libtorch") != nullptr ||
                                         std::strstr(found.dli_fname, "libc10") != nullptr);
}

bool failsNow(const void* caller) {
  if (count < 0) return false;
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  if (std::strncmp(name, begin, std::strlen(begin)) != 0 || isTorch(caller)) return false;
  return ++count == failing;
}

}  // namespace

extern "C" void failAllocation(const char* threads, long number) {
  std::strncpy(begin, threads, sizeof begin - 1);
  failing = number;
  count = 0;
}

// Returns the number of allocations since failAllocation().
extern "C" long endFailure() {
  return count.exchange(kNotCounted);
}

void* operator new(size_t bytes) {
  if (failsNow(__builtin_return_address(0))) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept {
  std::free(memory);
}

void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
