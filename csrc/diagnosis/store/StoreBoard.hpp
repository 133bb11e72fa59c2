// A part of the job's store as a key-value board.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/StorePlace.hpp"
#include "base/StoreValue.hpp"
#include "diagnosis/hang/SharedBoard.hpp"
#include "diagnosis/store/JobStore.hpp"

namespace torchcomms_pg {

// The keys below the prefixes of a group's store, over the process's one connection. Thread-safe.
class StoreBoard final : public SharedBoard {
 public:
  explicit StoreBoard(const c10::intrusive_ptr<c10d::Store>& store)
      : StoreBoard(StorePlace(store)) {}
  // All keys of the store.
  explicit StoreBoard(std::shared_ptr<JobStore> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->call([&](auto& store) {
      store.set(prefixes_ + key, std::vector<uint8_t>(value.begin(), value.end()));
    });
  }

  std::optional<std::string> get(const std::string& key) override {
    return store_->call([&](auto& store) { return valueOf(store, prefixes_ + key); });
  }

  bool claim(const std::string& key, const std::string& value) override {
    return claimed(key, value) == value;
  }

  // Does the same, and returns the value that the key then has.
  std::string claimed(const std::string& key, const std::string& value) {
    return store_->call([&](auto& store) { return claimIn(store, prefixes_ + key, value); });
  }

  int64_t add(const std::string& key, int64_t value) override {
    if (value == 0) {
      // A FileStore would append each addition to its file.
      const auto sum = get(key);
      return sum ? std::stoll(*sum) : 0;
    }
    return store_->call([&](auto& store) { return store.add(prefixes_ + key, value); });
  }

  void erase(const std::string& key) {
    store_->call([&](auto& store) { store.deleteKey(prefixes_ + key); });
  }

 private:
  explicit StoreBoard(const StorePlace& place)
      : store_(JobStore::of(place.store)), prefixes_(place.prefixes) {}

  const std::shared_ptr<JobStore> store_;
  const std::string prefixes_;
};

}  // namespace torchcomms_pg
