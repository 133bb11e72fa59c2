#include "gloo/Execution.hpp"

#include <algorithm>

#include "shm/api/Api.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Returns the tag for a collective's data on a link. The tag depends on the signature: ranks that
// call different collectives then wait at different tags until the envelopes reveal the mismatch.
// With equal tags, a rank could receive data of an unexpected size, and Gloo would end the process.
// Tags may repeat, since data of one tag keeps its order.
int dataTagOf(const Signature& signature, int tag) {
  uint64_t hash = signature.kind | signature.types << 8 | signature.root << 16;
  hash = (hash * 0x9e3779b97f4a7c15u) ^ signature.countLow;
  hash = (hash * 0x9e3779b97f4a7c15u) ^ signature.countHigh;
  hash *= 0x9e3779b97f4a7c15u;
  return Link::kCollectiveDataTags + static_cast<int>(hash >> 45 << 10 | (tag & 1023));
}

}  // namespace

void Comm::run(const Collective& collective, uint64_t place) {
  execute(place, [&] { runHere(collective, place); });
}

void Comm::runHere(const Collective& collective, uint64_t place) {
  Execution(*this, host::signatureOf(collective), place).run(collective);
}

void Comm::exchange(
    const std::vector<Part>& sends, const std::vector<Part>& receives, ncclDataType_t type,
    uint64_t place) {
  const Collective c{Kind::allToAll, nullptr, nullptr, 0, type};
  execute(place, [&] {
    Execution(*this, host::signatureOf(c), place).exchange(sends, receives, false);
  });
}

Execution::Execution(Comm& comm, const Signature& signature, uint64_t place)
    : comm_(comm),
      t_(comm.topology()),
      signature_(signature),
      tag_(Link::kCollectiveTags + 1 + static_cast<int>(place % (Link::kTagLimit - 1))),
      dataTag_(dataTagOf(signature, tag_)),
      hosts_(static_cast<int>(t_.hosts.size())),
      host_(t_.host()),
      announcedTo_(hosts_),
      announcedBy_(hosts_) {}

void Execution::run(const Collective& c) {
  if (hosts_ == 1 && c.kind != Kind::split) {
    return inside(c);
  }
  switch (c.kind) {
    case Kind::allReduce: {
      const bool small = std::min(hosts_, kStraight) * c.count * elementSize(c.type) <= kSmall;
      return small ? allReduceSmall(c) : reduceInPieces(c);
    }
    case Kind::reduce: return c.count == 0 ? barrier() : reduceInPieces(c);
    case Kind::reduceScatter: return reduceScatter(c);
    case Kind::split:
    case Kind::allGather: return allGather(c);
    case Kind::broadcast: return broadcast(c);
    case Kind::gather: return gather(c);
    case Kind::scatter: return scatter(c);
    case Kind::barrier: return barrier();
    case Kind::allToAll: {
      const size_t bytes = c.count * elementSize(c.type);
      std::vector<Part> sends, receives;
      for (int peer = 0; peer < t_.size; ++peer) {
        sends.push_back({const_cast<char*>(at(c.input, peer * bytes)), bytes});
        receives.push_back({at(c.output, peer * bytes), bytes});
      }
      return exchange(sends, receives, true);
    }
    case Kind::window: return;
  }
}

void Execution::inside(const std::vector<Message>& hops) {
  if (hops.empty()) {
    return;
  }
  const auto& library = shm::library();
  library.groupStart();
  for (const auto& hop : hops) {
    library.run(hop, comm_.members_.inside, nullptr);
  }
  comm_.checkInside(library.groupEnd());
}

// Returns the ranks of `host` for which Topology::railOf() is `rail`.
std::vector<int> Execution::onRail(int host, int rail) const {
  std::vector<int> ranks;
  for (const int rank : t_.hosts[host]) {
    if (t_.railOf(rank) == rail) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// Synchronizes the ranks of each host, then the first ranks of all hosts, then the ranks of each
// host again. Up to kStraight hosts synchronize in a single step, more hosts in a dissemination
// barrier (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988).
void Execution::barrier() {
  const Collective here{Kind::barrier};
  inside(here);
  if (local() == 0) {
    Step step(*this);
    for (int distance = 1;
         distance<hosts_; distance = hosts_> kStraight ? 2 * distance : distance + 1) {
      step.receive((host_ + hosts_ - distance) % hosts_, nullptr, 0);
      step.send((host_ + distance) % hosts_, nullptr, 0);
      if (hosts_ > kStraight) step.finish();
    }
    step.finish();
  }
  inside(here);
}

}  // namespace torchcomms_pg::gloo
