#include "Allocations.hpp"

#include <cstdlib>
#include <new>

namespace test {

thread_local int allocationsLeft = -1;
thread_local bool memoryStaysOut = false;

namespace {

bool failsNow() {
  if (allocationsLeft < 0) return false;
  if (allocationsLeft > 0) {
    --allocationsLeft;
    return false;
  }
  if (!memoryStaysOut) allocationsLeft = -1;
  return true;
}

}  // namespace

}  // namespace test

void* operator new(size_t bytes) {
  if (test::failsNow()) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

// Sanitizers pair it with the delete below, too.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes == 0 ? 1 : bytes);
}

void operator delete(void* memory) noexcept {
  std::free(memory);
}

void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
