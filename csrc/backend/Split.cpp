// Groups made from a group: split, shrunk, merged.
#include <algorithm>
#include <utility>

#include "backend/Backend.hpp"

namespace torchcomms_pg {

c10::intrusive_ptr<GroupOptions> Backend::childOptions(
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const char* what) const {
  if (opts == nullptr) {
    return c10::make_intrusive<GroupOptions>(*options_);
  }
  const auto ours = c10::dynamic_intrusive_pointer_cast<GroupOptions>(opts);
  if (ours == nullptr && options_->backend != kBackendName) {  // options of Gloo
    auto options = c10::make_intrusive<GroupOptions>(*options_);
    options->timeout = opts->timeout;
    return options;
  }
  TORCH_CHECK_TYPE(
      ours != nullptr, what,
      ": the options are not torchcomms_pg.Backend.Options; make them with "
      "torchcomms_pg.Backend.Options()");
  auto options = c10::make_intrusive<GroupOptions>(*ours);
  options->connectGloo = options_->connectGloo;
  if (!options->endsProcess) {
    options->endsProcess = options_->endsProcess;
  }
  options->acceleratorEnds = options_->acceleratorEnds;
  options->accelerator.ranksPerRoot = options_->accelerator.ranksPerRoot;
  if (options->accelerator.library.folder.empty()) {
    options->accelerator.library = options_->accelerator.library;
  }
  return options;
}

std::string Backend::childName(const GroupOptions& options, const char* how) {
  if (options.group_name != options_->group_name) {
    return options.group_name;
  }
  const auto name =
      keyOf(options_->group_name + ":" + how + ":" + joinRanks(options.global_ranks_in_group));
  auto unique = name;
  LockGuard lock(childrenMutex_);
  for (int number = 2; children_.contains(unique); ++number) {
    unique = name + ":" + std::to_string(number);
  }
  return unique;
}

void Backend::noteChild(const GroupOptions& options) {
  LockGuard lock(childrenMutex_);
  children_.insert(options.group_name);
}

c10::intrusive_ptr<c10d::Backend> Backend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  auto options = childOptions(opts, "split");
  options->global_ranks_in_group.clear();
  const auto global = globalRanks();
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(
        rank >= 0 && rank < getSize(), "split: rank ", rank,
        " is not a rank of this group, wanted 0 to ", getSize() - 1);
    options->global_ranks_in_group.push_back(static_cast<uint64_t>(global[rank]));
  }
  ++splits_;
  const auto position = std::find(ranks.begin(), ranks.end(), getRank());
  if (position == ranks.end()) {
    return nullptr;
  }
  options->group_name = childName(*options, "split");
  // Members rendezvous through the store. ncclCommSplit could deadlock, since it is collective over
  // the parent, non-members included: torch calls split() once per device type of the group on
  // non-members but once per backend on members, and the calls cannot be matched. With
  // use_local_synchronization, new_group does not call split() on non-members.
  auto info = c10::make_intrusive<c10d::PrefixStore>("split/" + keyOf(options->group_name), store);
  auto made = c10::make_intrusive<Backend>(
      info, static_cast<int>(position - ranks.begin()), static_cast<int>(ranks.size()), options);
  noteChild(*options);
  return made;
}

c10::intrusive_ptr<c10d::Backend> Backend::shrink(
    const std::vector<int64_t>& excluded, int flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  auto options = childOptions(opts, "shrink");
  const auto global = globalRanks();
  const std::vector<int> gone(excluded.begin(), excluded.end());
  options->global_ranks_in_group.clear();
  for (int rank = 0; rank < getSize(); ++rank) {
    if (std::ranges::find(gone, rank) == gone.end()) {
      options->global_ranks_in_group.push_back(static_cast<uint64_t>(global[rank]));
    }
  }
  options->group_name = childName(*options, "shrink");
  prepare("shrink");
  std::vector<CommPtr> children;
  for (const auto& comm : communicators()) {
    if (!comm->pair().empty()) {
      continue;  // a message that needs such a communicator makes it anew
    }
    children.push_back(comm->shrink(
        gone, (flags & NCCL_SHRINK_ABORT) != 0, describeGroup(*options), options->timeout));
  }
  noteChild(*options);
  const int rank = children.front()->rank();
  const int size = children.front()->size();
  c10::intrusive_ptr<c10d::Store> store;  // null if this group has none
  if (store_ != nullptr) {
    store = c10::make_intrusive<c10d::PrefixStore>("shrunk/" + keyOf(options->group_name), store_);
  }
  return c10::intrusive_ptr<Backend>::unsafe_steal_from_new(
      new Backend(std::move(store), children, rank, size, std::move(options)));
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank, const int& size) {
  auto options = childOptions(opts, "merge");
  if (options->global_ranks_in_group.size() != static_cast<size_t>(size)) {
    options->global_ranks_in_group.clear();  // the list is the smaller group's
  }
  const auto& own = options_->group_name;
  if (options->group_name == own || options->group_name.rfind(own + ":", 0) == 0) {
    options->group_name = "merged";  // torch's name is not the same on all members
  }
  auto merged = c10::make_intrusive<Backend>(store, rank, size, std::move(options));
  merged->forgetPeers();  // its ranks are not the store's global ranks
  return merged;
}

}  // namespace torchcomms_pg
