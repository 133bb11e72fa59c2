// Maps ranks to hosts, and to the rails between hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torchcomms_pg::gloo {

// Hosts and rails. Rail n connects the n-th ranks of all hosts; the word is NCCL's. There are
// as many rails as the smallest host has ranks, and at most kMaxRails. Ranks on the same rail are
// counterparts.
struct Topology {
  static constexpr int kMaxRails = 8;

  // Makes the topology. `places`: by rank, its host's identifier. `names`: by rank, its host's name
  // in errors; may be empty.
  static std::shared_ptr<const Topology> of(
      const std::vector<std::string>& places, const std::vector<std::string>& names, int rank);

  int rank = 0;
  int size = 1;
  // the ranks of each host, ascending; hosts are ordered by first rank
  std::vector<std::vector<int>> hosts;
  std::vector<int> hostOf;         // by rank: index into hosts
  std::vector<int> localOf;        // by rank: index in its host's list
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
  // Returns whether every rank has its own rail.
  bool even() const;
  // Returns whether a host's ranks are consecutive.
  bool contiguous(int host) const {
    return hosts[host].back() - hosts[host].front() + 1 == static_cast<int>(hosts[host].size());
  }
};

}  // namespace torchcomms_pg::gloo
