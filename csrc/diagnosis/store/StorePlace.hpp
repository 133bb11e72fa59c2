// The job's store, beneath the prefixes under which each group has its keys.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"

namespace torchcomms_pg {

// The place of a group's keys.
struct StorePlace {
  explicit StorePlace(c10::intrusive_ptr<c10d::Store> of) : store(std::move(of)) {
    while (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
      prefixes = WithPrefix::of(*prefixed) + "/" + prefixes;
      store = prefixed->getUnderlyingStore();
    }
  }

  c10::intrusive_ptr<c10d::Store> store;  // the job's store
  std::string prefixes;                   // prefixes of the group's keys in it

 private:
  // Gives access to the prefix, for which c10d has no method.
  struct WithPrefix : c10d::PrefixStore {
    static const std::string& of(const c10d::PrefixStore& store) {
      return store.*(&WithPrefix::prefix_);
    }
  };
};

// Keeps one T for each store while a caller holds a reference to the T. Thread-safe.
template <class T>
class PerStore {
 public:
  // Returns the T of the job's store, and makes it with `make` if it does not exist.
  std::shared_ptr<T> of(const c10::intrusive_ptr<c10d::Store>& store, auto make) {
    LockGuard lock(mutex_);
    std::erase_if(all_, [](const auto& each) { return each.second.expired(); });
    auto& slot = all_[store.get()];
    auto known = slot.lock();
    if (!known) {
      known = make();
      slot = known;
    }
    return known;
  }

  // Returns every existing T.
  std::vector<std::shared_ptr<T>> all() {
    std::vector<std::shared_ptr<T>> held;
    LockGuard lock(mutex_);
    for (const auto& [store, each] : all_) {
      if (auto known = each.lock()) {
        held.push_back(std::move(known));
      }
    }
    return held;
  }

 private:
  Mutex mutex_;
  std::map<c10d::Store*, std::weak_ptr<T>> all_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg
