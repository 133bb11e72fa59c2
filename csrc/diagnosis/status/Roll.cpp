#include "diagnosis/status/Roll.hpp"

#include <algorithm>
#include <iterator>
#include <vector>

namespace torchcomms_pg::status {

namespace {

// Returns the ids of the process's groups, and the numbers of its meetings.
std::vector<uint64_t> linksOf(const ProcessStatus& process) {
  std::vector<uint64_t> links;
  std::ranges::transform(groupsOf(process), std::back_inserter(links), &MemberStatus::id);
  for (const auto& wait : process.otherWaits) {
    if (wait.meeting != 0) {
      links.push_back(wait.meeting);
    }
  }
  return links;
}

}  // namespace

bool Roll::includes(const ProcessStatus& process) const {
  return std::ranges::any_of(linksOf(process), [&](uint64_t link) { return includes(link); });
}

void Roll::take(const ProcessStatus& process) {
  for (const auto& group : groupsOf(process)) {
    knowsGroup_ = true;
    const bool isNew = job_.insert(group.id).second;
    for (const auto number : group.ranks) {
      if (isNew && !heard_.contains({group.id, number})) {
        wanted_.insert({group.id, number});
      }
    }
  }
  const auto links = linksOf(process);
  job_.insert(links.begin(), links.end());
}

void Roll::add(const HostStatus& host) {
  for (const auto& process : host.processes) {
    for (const auto& group : groupsOf(process)) {
      hear({group.id, group.ranks[group.rank]});
    }
    if (isAsked(host, process) || includes(process)) {
      take(process);
    } else {
      unconnected_.push_back(process);
    }
  }
  for (const auto& silent : host.silent) {
    for (const auto& each : silent.memberships) {
      hear({each.group, each.rank});
    }
  }
  while (unconnected_.remove_if(
             [&](const auto& process) { return includes(process) && (take(process), true); }) > 0) {
  }
}

}  // namespace torchcomms_pg::status
