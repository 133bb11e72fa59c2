// The store through which Gloo exchanges the ranks' addresses.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "base/StoreValue.hpp"
#include "base/TorchCompat.hpp"

namespace torchcomms_pg {

// Reads each key from the wrapped store only once, in one round trip. Gloo asks for each key three
// times, and also for keys that it has set. Thread-safe.
class AddressStore final : public c10d::Store {
 public:
  AddressStore(c10::intrusive_ptr<c10d::Store> store, int ranks)
      : c10d::Store(store->getTimeout()), store_(std::move(store)), ranks_(ranks) {}

  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    store_->set(key, value);
    keep(key, value);
  }

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    LockGuard lock(mutex_);
    return values_.at(key);
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (const auto& key : keys) {
      for (StorePauses pauses(ranks_); !known(key); pauses.next()) {
        if (const auto value = valueOf(*store_, key)) {
          keep(key, {value->begin(), value->end()});
          break;
        }
        if (std::chrono::steady_clock::now() >= deadline) {
          C10_THROW_ERROR(
              DistStoreError, "no rank has written '" + key + "' within " +
                                  std::to_string(timeout.count()) + " ms");
        }
      }
    }
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<AddressStore>(store_->clone(), ranks_);
  }
  int64_t add(const std::string& key, int64_t value) override { return store_->add(key, value); }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }

 private:
  bool known(const std::string& key) {
    LockGuard lock(mutex_);
    return values_.contains(key);
  }
  void keep(const std::string& key, std::vector<uint8_t> value) {
    LockGuard lock(mutex_);
    values_[key] = std::move(value);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int ranks_;
  Mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg
