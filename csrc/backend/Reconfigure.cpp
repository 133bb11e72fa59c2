// Replacement of the members of an existing group, which torch has from 2.14 on.
#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>

#include "backend/Backend.hpp"
#include "base/TextStreams.hpp"
#include "comm/OpenCall.hpp"
#include "operation/CommError.hpp"

namespace torchcomms_pg {

namespace {

// Handle of a member: "torchcomms:<rank in the group when created>:<16 hexadecimal digits>". It
// stays the same while the group exists. A process that replaces another has a new handle.
struct Handle {
  int rank = 0;
  std::string identity;
  std::string text;

  auto operator<=>(const Handle&) const = default;
};

Handle parse(const std::string& text) {
  const std::string prefix = std::string(kBackendName) + ":";
  TextReader rest(text.substr(std::min(prefix.size(), text.size())));
  Handle handle;
  handle.text = text;
  char colon = 0;
  rest >> handle.rank >> colon >> handle.identity;
  TORCH_CHECK_VALUE(
      text.compare(0, prefix.size(), prefix) == 0 && rest && colon == ':' && rest.eof(),
      "reconfigure: '", text,
      "' is not a handle; handles has for each member what get_reconfigure_handle returned there");
  return handle;
}

// Returns the handles in the caller's order. If the caller passes a set, sorts them by the members'
// original ranks, so that every member gets the same order.
std::vector<Handle> order(const latest::ReconfigureOptions& opts) {
  std::vector<Handle> handles;
  std::visit(
      [&](const auto& given) {
        for (const auto& text : given) {
          handles.push_back(parse(text));
        }
      },
      opts.handles);
  TORCH_CHECK_VALUE(
      !handles.empty(), "reconfigure: handles is empty, wanted one handle for each member");
  auto sorted = handles;
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  TORCH_CHECK_VALUE(
      twice == sorted.end(), "reconfigure: handles has '", twice == sorted.end() ? "" : twice->text,
      "' twice, wanted each member once");
  return std::holds_alternative<std::vector<latest::ReconfigureHandle>>(opts.handles) ? handles
                                                                                      : sorted;
}

// Returns the key of the rendezvous in the store. It includes the handles: members that were given
// different handles must not meet.
std::string rendezvousOf(int64_t uuid, const std::vector<Handle>& handles) {
  std::string all;
  for (const auto& handle : handles) {
    all += handle.text + " ";
  }
  return "reconfigure/" + std::to_string(uuid) + "/" + keyOf(all);
}

Failure notAllCame(
    Failure failure, int64_t uuid, const std::string& group, const std::vector<Handle>& handles,
    Milliseconds timeout) {
  std::string who;
  for (const int rank : failure.ranks) {
    who += (who.empty() ? "" : ", ") + std::string("rank ") + std::to_string(rank) + " ('" +
           handles[rank].text + "')";
  }
  failure.message = "reconfigure of group '" + group + "' to uuid " + std::to_string(uuid) +
                    ": within " + inSeconds(timeout) + " " +
                    (who.empty() ? "rank 0 did not answer" : who + " did not come") +
                    "; every member calls it with this uuid and the same handles in the same "
                    "order. Try again with a new uuid; until then the group is as it was";
  failure.op = "reconfigure";
  return failure;
}

}  // namespace

std::string Backend::newHandle(int rank) {
  std::random_device source;
  char identity[17];
  snprintf(identity, sizeof identity, "%08x%08x", source(), source());
  return std::string(kBackendName) + ":" + std::to_string(rank) + ":" + identity;
}

latest::ReconfigureHandle Backend::get_reconfigure_handle() const {
  TORCH_CHECK(
      supportsReconfigure(), "get_reconfigure_handle: group '", options_->group_name,
      "' is that of a TorchComm, which has the members it was made with; make a new one");
  return handle_;
}

Backend::WorkPtr Backend::reconfigure(const latest::ReconfigureOptions& opts) {
  const auto handles = order(opts);
  const auto timeout = opts.timeout.value_or(options_->timeout);
  TORCH_CHECK_VALUE(
      timeout.count() > 0, "reconfigure: timeout must be positive, got ", timeout.count(), " ms");
  const auto own = get_reconfigure_handle();
  const auto place = std::ranges::find(handles, own, &Handle::text);
  TORCH_CHECK_VALUE(
      place != handles.end(), "reconfigure: this member's handle '", own,
      "' is not among handles; only members of the new group call it");

  const LongLock::Held reconfiguring(
      reconfiguration_,
      [&] {
        OpenCall::refuseIn(describeGroup(*options_), getRank(), "reconfigure", "reconfigure");
      },
      [] {});
  TORCH_CHECK_VALUE(
      uuids_.insert(opts.uuid).second, "reconfigure: uuid ", opts.uuid,
      " was used before, wanted a new one for every call, also after one that failed");
  const int rank = static_cast<int>(place - handles.begin());
  const int size = static_cast<int>(handles.size());
  const auto deadline = Clock::now() + timeout;
  const auto rendezvous = rendezvousOf(opts.uuid, handles);
  CommPtr fresh;
  try {
    Group group;  // its ranks are unrelated to the default group's
    group.name = options_->group_name + ":" + std::to_string(opts.uuid);
    group.backend = options_->backend;
    fresh = connectHosts(
        {store_, rank, size, std::move(group), rendezvous, timeout}, options_->connectGloo);
    fresh->setTimeout(options_->timeout);
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
    fresh->joining().awaitRanks(std::max(left, Milliseconds(1)));
  } catch (const CommError& error) {
    if (error.failure().type != c10d::ErrorType::TIMEOUT) {
      throw;
    }
    throw CommError(notAllCame(error.failure(), opts.uuid, options_->group_name, handles, timeout));
  }

  if (const auto old = cpu()) {
    fresh->inheritFrom(*old);
  }
  configure(*fresh);
  const auto creating = holdCreation("reconfigure", /*hurry=*/true);
  forgetPeers();
  const auto retired = communicators();
  {
    // The new members make accelerators' communicators anew with the first tensors.
    LockGuard lock(communicatorsMutex_);
    accelerators_.clear();
    pairs_.clear();
  }
  members_ = rendezvous;
  peers_.clear();  // they are processes of the former ranks
  options_->global_ranks_in_group.clear();
  rank_ = rank;
  size_ = size;
  keep(fresh);
  adopt(*fresh);
  for (const auto& old : retired) {
    old->retire("reconfigure()");
    old->groupHooks().set(nullptr, nullptr);
  }
  return fresh->finishedWork(OpKind::initialization, {});
}

}  // namespace torchcomms_pg
