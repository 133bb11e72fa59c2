#include "gloo/Topology.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace torchcomms_pg::gloo {

std::shared_ptr<const Topology> Topology::of(
    const std::vector<std::string>& places, const std::vector<std::string>& names, int rank) {
  Topology t;
  t.names = names;
  t.rank = rank;
  t.size = static_cast<int>(places.size());
  std::map<std::string, int> known;
  for (int peer = 0; peer < t.size; ++peer) {
    const auto [entry, fresh] = known.try_emplace(places[peer], static_cast<int>(t.hosts.size()));
    if (fresh) {
      t.hosts.emplace_back();
    }
    auto& members = t.hosts[entry->second];
    t.hostOf.push_back(entry->second);
    t.localOf.push_back(static_cast<int>(members.size()));
    members.push_back(peer);
  }
  t.rails = kMaxRails;
  for (const auto& members : t.hosts) {
    t.rails = std::min(t.rails, static_cast<int>(members.size()));
  }
  return std::make_shared<const Topology>(std::move(t));
}

}  // namespace torchcomms_pg::gloo
