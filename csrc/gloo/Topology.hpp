// Maps ranks to hosts, and to the rails between hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torchcomms_pg::gloo {

// The hosts and rails of a group. Rail n connects the n-th ranks of all hosts (the word is NCCL's).
// The number of rails is the number of ranks of the smallest host, but at most kMaxRails. Ranks on
// the same rail are counterparts.
struct Topology {
  static constexpr int kMaxRails = 8;

  // Makes the topology. `places`: by rank, the identifier of its host. `names`: by rank, the name
  // of its host in errors; may be empty. `rank`: this process's rank.
  static std::shared_ptr<const Topology> of(
      const std::vector<std::string>& places, const std::vector<std::string>& names, int rank);

  int rank = 0;
  int size = 1;
  // the ranks of each host, ascending; hosts are ordered by first rank
  std::vector<std::vector<int>> hosts;
  std::vector<int> hostOf;         // by rank: index of its host in `hosts`
  std::vector<int> localOf;        // by rank: index in the list of its host
  std::vector<std::string> names;  // by rank: the name of its host; may be empty
  int rails = 1;

  // Returns the name of a rank, such as "rank 3 on host1".
  std::string nameOf(int of) const {
    return "rank " + std::to_string(of) + (names.empty() ? "" : " on " + names[of]);
  }
  int host() const { return hostOf[rank]; }
  int local() const { return localOf[rank]; }
  const std::vector<int>& inside() const { return hosts[host()]; }
  // Returns the rail that carries the data from and to rank `of`.
  int railOf(int of) const { return localOf[of] % rails; }
  bool onRail(int of) const { return localOf[of] < rails; }
  // Returns whether every rank is on a rail: then each host has `rails` ranks.
  bool even() const { return size == rails * static_cast<int>(hosts.size()); }
  // Returns whether the ranks of a host have consecutive numbers.
  bool contiguous(int host) const {
    return hosts[host].back() - hosts[host].front() + 1 == static_cast<int>(hosts[host].size());
  }
};

}  // namespace torchcomms_pg::gloo
