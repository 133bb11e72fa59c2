// A shared pointer that several threads may read and replace.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace torchcomms_pg {

// Replaces std::atomic<std::shared_ptr<T>>, which libstdc++ before 12 and libc++ lack. Uses
// std::atomic_load and its relatives, which C++20 deprecates and C++26 removes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
template <class T>
class AtomicShared {
 public:
  AtomicShared() = default;
  AtomicShared(const AtomicShared&) = delete;
  AtomicShared& operator=(const AtomicShared&) = delete;

  std::shared_ptr<T> load() const { return std::atomic_load(&pointer_); }
  void store(std::shared_ptr<T> next) { std::atomic_store(&pointer_, std::move(next)); }
  std::shared_ptr<T> exchange(std::shared_ptr<T> next) {
    return std::atomic_exchange(&pointer_, std::move(next));
  }
  bool compare_exchange_strong(std::shared_ptr<T>& expected, std::shared_ptr<T> next) {
    return std::atomic_compare_exchange_strong(&pointer_, &expected, std::move(next));
  }

 private:
  std::shared_ptr<T> pointer_;
};
#pragma GCC diagnostic pop

}  // namespace torchcomms_pg
