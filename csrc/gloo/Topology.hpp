// Maps ranks to hosts, and to the lanes between hosts.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torchcomms_pg::gloo {

// Hosts and lanes. The n-th rank of every host is on lane n: the lanes are the connections between
// the hosts, of one rank of each. There are as many as the smallest host has ranks, and at most
// kMaxLanes.
struct Topology {
  static constexpr int kMaxLanes = 8;

  // Makes the topology. `places`: by rank, where it runs. `names`: by rank, the host's name in
  // errors; empty: none.
  static std::shared_ptr<const Topology> of(
      const std::vector<std::string>& places, const std::vector<std::string>& names, int rank);

  int rank = 0;
  int size = 1;
  std::vector<std::vector<int>> hosts;  // the ranks of each, ascending; by their first
  std::vector<int> hostOf;              // by rank: index into hosts
  std::vector<int> localOf;             // by rank: index among those of its host
  std::vector<std::string> names;       // by rank, of its host; may be empty
  int lanes = 1;

  // Returns the name of a rank, such as "rank 3 on host1".
  std::string nameOf(int of) const {
    return "rank " + std::to_string(of) + (names.empty() ? "" : " on " + names[of]);
  }
  int host() const { return hostOf[rank]; }
  int local() const { return localOf[rank]; }
  const std::vector<int>& inside() const { return hosts[host()]; }
  // Returns the lane that carries what comes from `rank` or goes to it.
  int laneOf(int of) const { return localOf[of] % lanes; }
  bool onLane(int of) const { return localOf[of] < lanes; }
  // Returns whether every rank has a lane of its own.
  bool even() const;
  // Returns whether a host's ranks follow each other.
  bool contiguous(int host) const {
    return hosts[host].back() - hosts[host].front() + 1 == static_cast<int>(hosts[host].size());
  }
};

}  // namespace torchcomms_pg::gloo
