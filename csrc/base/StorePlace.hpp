// The job's store, beneath the prefixes under which each group has its keys.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <utility>

namespace torchcomms_pg {

// The place of a group's keys.
struct StorePlace {
  explicit StorePlace(c10::intrusive_ptr<c10d::Store> of) : store(std::move(of)) {
    while (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
      prefixes = WithPrefix::of(*prefixed) + "/" + prefixes;
      store = prefixed->getUnderlyingStore();
    }
  }

  // Returns the prefix with which a PrefixStore of the job's store is at this place.
  std::string prefix() const { return prefixes.substr(0, prefixes.size() - 1); }

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

}  // namespace torchcomms_pg
