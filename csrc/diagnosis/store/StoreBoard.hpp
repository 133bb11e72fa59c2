// A part of the job's store as a key-value board.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/StoreValue.hpp"
#include "diagnosis/hang/HangDiagnosis.hpp"
#include "diagnosis/store/StoreServer.hpp"

namespace torchcomms_pg {

// Keys and values of diagnoses, of lateness, or of the status for other hosts. Not thread-safe.
class StoreBoard final : public SharedBoard {
 public:
  explicit StoreBoard(c10::intrusive_ptr<c10d::Store> store) : shared_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store().set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }

  std::optional<std::string> get(const std::string& key) override { return valueOf(store(), key); }

  bool claim(const std::string& key, const std::string& value) override {
    return claimIn(store(), key, value) == value;
  }

  // Does the same, and returns the value that the key then has.
  std::string claimed(const std::string& key, const std::string& value) {
    return claimIn(store(), key, value);
  }

  int64_t add(const std::string& key, int64_t value) override { return store().add(key, value); }

  void erase(const std::string& key) { store().deleteKey(key); }

 private:
  // Returns a separate connection, since another thread may block in the shared one. Opens the
  // connection at the first use, since most groups never need it. Raises c10::DistStoreError if the
  // store's server has ended.
  c10d::Store& store() {
    if (!own_) {
      server_ = StoreServer::of(shared_);
    }
    if (server_) {
      server_->check();
    }
    if (!own_) {
      own_ = shared_->clone();
      shared_.reset();
    }
    return *own_;
  }

  c10::intrusive_ptr<c10d::Store> shared_;
  c10::intrusive_ptr<c10d::Store> own_;
  std::shared_ptr<StoreServer> server_;  // null if the store has no server
};

}  // namespace torchcomms_pg
