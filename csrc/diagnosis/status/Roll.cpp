#include "diagnosis/status/Roll.hpp"

#include <algorithm>

namespace torchcomms_pg::status {

bool Roll::take(const ProcessStatus& process, bool asked) {
  const auto isOfJob = [&](const auto& rank) {
    return std::ranges::any_of(
        rank.groups, [&](const auto& group) { return job_.contains(group.id); });
  };
  if (!asked && std::ranges::none_of(process.ranks, isOfJob)) {
    return false;
  }
  for (const auto& rank : process.ranks) {
    for (const auto& group : rank.groups) {
      if (job_.insert(group.id).second) {
        for (const auto number : group.ranks) {
          if (!heard_.contains({group.id, number})) {
            wanted_.insert({group.id, number});
          }
        }
      }
    }
  }
  return true;
}

void Roll::add(const HostStatus& host) {
  for (const auto& process : host.processes) {
    for (const auto& rank : process.ranks) {
      for (const auto& group : rank.groups) {
        hear({group.id, group.ranks[group.rank]});
      }
    }
    if (!take(process, process.pid == asked_.pid && host.host == asked_.host)) {
      unconnected_.push_back(process);
    }
  }
  for (const auto& silent : host.silent) {
    for (const auto& each : silent.memberships) {
      hear({each.group, each.rank});
    }
  }
  while (unconnected_.remove_if([&](const auto& process) { return take(process, false); }) > 0) {
  }
}

}  // namespace torchcomms_pg::status
