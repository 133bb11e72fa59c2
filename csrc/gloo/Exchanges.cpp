// All-to-all between hosts.
#include <algorithm>
#include <numeric>

#include "gloo/Execution.hpp"
#include "host/Reduce.hpp"

namespace torchcomms_pg::gloo {

// Executes an exchange in which every rank is the only one on its host. The envelopes carry the
// sizes.
void Execution::exchangeStraight(
    const std::vector<Part>& sends, const std::vector<Part>& receives) {
  Step step(*this);
  for (int peer = 0; peer < t_.size; ++peer) {
    for (const bool sending : {false, true}) {
      const auto& part = (sending ? sends : receives)[peer];
      auto signature = signature_;
      signature.countLow = static_cast<uint32_t>(part.bytes);
      signature.countHigh = static_cast<uint32_t>(part.bytes >> 32);
      if (peer != t_.rank) {
        step.add(
            {.signature = signature,
             .sending = sending,
             .peer = peer,
             .tag = tag_,
             .data = part.data,
             .bytes = part.bytes});
      }
    }
  }
  step.finish();
}

// Sizes in bytes of the parts that each rank of this host sends to every rank of the group, and of
// the parts that it expects.
struct Execution::Sizes {
  uint64_t sent(int local, int to) const { return same ? each : all[2 * local * ranks + to]; }
  uint64_t awaited(int local, int from) const {
    return same ? each : all[(2 * local + 1) * ranks + from];
  }
  bool same = false;
  uint64_t each = 0;
  size_t ranks = 0;
  std::vector<uint64_t> all;
};

Execution::Sizes Execution::tellSizes(
    const std::vector<Part>& sends, const std::vector<Part>& receives, bool same) {
  Sizes sizes{same, sends.front().bytes, sends.size(), {}};
  if (same) {
    inside({Kind::barrier});
    return sizes;
  }
  std::vector<uint64_t> mine;
  for (const auto* parts : {&sends, &receives}) {
    for (const auto& part : *parts) {
      mine.push_back(part.bytes);
    }
  }
  sizes.all.resize(localSize() * mine.size());
  inside({Kind::allGather, mine.data(), sizes.all.data(), mine.size(), ncclUint64});
  return sizes;
}

// Executes an exchange over rails. Ranks on no rail first send their parts for other hosts to the
// rank on the rail that carries them. The rank on each rail then sends one packet to its
// counterpart on every other host, and the counterpart scatters the packet's parts among its host's
// ranks.
void Execution::exchange(
    const std::vector<Part>& sends, const std::vector<Part>& receives, bool sameSizes) {
  const auto& [given, bytes] = sends[t_.rank];
  const auto& [taken, room] = receives[t_.rank];
  if (bytes != room) {
    throw host::NcclError(
        ncclInvalidUsage, comm_.inside_->segment().nameOf(local()) + " sends itself " +
                              std::to_string(bytes) + " bytes and receives " +
                              std::to_string(room));
  }
  host::copy(taken, given, bytes);
  if (t_.size == hosts_ && !sameSizes) {
    return exchangeStraight(sends, receives);
  }
  const auto sizes = tellSizes(sends, receives, sameSizes);
  const auto adopted = handToRails(sends, sizes);
  std::vector<Block> leaving, arrived(hosts_);
  // by host: sizes in bytes, ordered by source on this rail, then by receiver on this host
  std::vector<std::vector<uint64_t>> theirs(hosts_);
  Step step(*this);
  if (onRail()) {
    if (sameSizes) {
      forOtherHosts([&](int host) {
        const auto parts = onRail(host, local()).size() * localSize();
        theirs[host].assign(parts, sends.front().bytes);
      });
    } else {
      exchangeSizes(sizes, theirs);
    }
    forOtherHosts([&](int host) {
      const auto all = std::accumulate(theirs[host].begin(), theirs[host].end(), size_t{0});
      const auto sources = onRail(host, local());
      const bool mine = sources.size() == 1 && localSize() == 1;
      if (!mine) arrived[host] = block(all);
      step.receive(host, mine ? receives[sources.front()].data : arrived[host].get(), all);
    });
    forOtherHosts([&](int host) {
      const auto [data, all] = pack(host, sends, sizes, adopted, leaving);
      step.send(host, data, all);
    });
  }
  std::vector<Message> hops;
  for (const int rank : t_.inside()) {
    if (rank != t_.rank) {
      hops.push_back(hop(true, t_.localOf[rank], sends[rank].data, sends[rank].bytes));
      hops.push_back(hop(false, t_.localOf[rank], receives[rank].data, receives[rank].bytes));
    }
  }
  inside(hops);
  step.finish();
  spread(receives, theirs, arrived);
}

// Sends the parts of ranks on no rail to the ranks on the rails that carry these parts. Returns the
// parts by the source's number on this host, each source's in the order of forOtherHosts().
std::map<int, Execution::Block> Execution::handToRails(
    const std::vector<Part>& sends, const Sizes& sizes) {
  std::map<int, Block> adopted;
  std::vector<Message> hops;
  for (int source = t_.rails; source < localSize(); ++source) {
    const int rail = source % t_.rails;
    if (source != local() && rail != local()) {
      continue;
    }
    size_t all = 0;
    forOtherHosts([&](int host) {
      for (const int rank : t_.hosts[host]) {
        all += sizes.sent(source, rank);
      }
    });
    auto& data = adopted[source] = block(all);
    if (rail == local()) {
      hops.push_back(hop(false, source, data.get(), all));
      continue;
    }
    char* to = data.get();
    forOtherHosts([&](int host) {
      for (const int rank : t_.hosts[host]) {
        host::copy(to, sends[rank].data, sends[rank].bytes);
        to += sends[rank].bytes;
      }
    });
    hops.push_back(hop(true, rail, data.get(), all));
  }
  inside(hops);
  return adopted;
}

// Exchanges sizes between counterparts: how much each rank of the rail sends to each rank of the
// other host. Raises, before data crosses hosts, if a receiver expects another size.
void Execution::exchangeSizes(const Sizes& sizes, std::vector<std::vector<uint64_t>>& theirs) {
  std::vector<std::vector<uint64_t>> ours(hosts_);
  Step step(*this);
  forOtherHosts([&](int host) {
    theirs[host].resize(onRail(host, local()).size() * localSize());
    step.receive(host, theirs[host].data(), theirs[host].size() * sizeof(uint64_t));
    for (const int source : onRail(host_, local())) {
      for (const int rank : t_.hosts[host]) {
        ours[host].push_back(sizes.sent(t_.localOf[source], rank));
      }
    }
    step.send(host, ours[host].data(), ours[host].size() * sizeof(uint64_t));
  });
  step.finish();
  forOtherHosts([&](int host) {
    auto sent = theirs[host].begin();
    for (const int source : onRail(host, local())) {
      for (int to = 0; to < localSize(); ++to, ++sent) {
        if (*sent != sizes.awaited(to, source)) {
          throw host::NcclError(
              ncclInvalidUsage, "the ranks disagree: " + t_.nameOf(t_.inside()[to]) + " expects " +
                                    std::to_string(sizes.awaited(to, source)) + " bytes of " +
                                    t_.nameOf(source) + ", which sends it " +
                                    std::to_string(*sent));
        }
      }
    }
  });
}

// Returns the data that this rail sends to a host, and its size. The data is ordered by source,
// then by receiver, and is copied to `packed` unless it is contiguous.
std::pair<const void*, size_t> Execution::pack(
    int host, const std::vector<Part>& sends, const Sizes& sizes,
    const std::map<int, Block>& adopted, std::vector<Block>& packed) {
  std::vector<Part> parts;
  for (const int source : onRail(host_, local())) {
    size_t first = 0;  // offset of an adopted source's data for `host`
    for (int i = 1; (host_ + i) % hosts_ != host; ++i) {
      for (const int rank : t_.hosts[(host_ + i) % hosts_]) {
        first += sizes.sent(t_.localOf[source], rank);
      }
    }
    for (const int rank : t_.hosts[host]) {
      const auto bytes = sizes.sent(t_.localOf[source], rank);
      parts.push_back(
          source == t_.rank ? sends[rank]
                            : Part{at(adopted.at(t_.localOf[source]).get(), first), bytes});
      first += bytes;
    }
  }
  std::erase_if(parts, [](const Part& part) { return part.bytes == 0; });
  const auto apart = [](const Part& one, const Part& next) {
    return at(one.data, one.bytes) != next.data;
  };
  size_t all = 0;
  for (const auto& part : parts) {
    all += part.bytes;
  }
  if (std::ranges::adjacent_find(parts, apart) == parts.end()) {
    return {parts.empty() ? nullptr : parts.front().data, all};
  }
  char* to = packed.emplace_back(block(all)).get();
  for (const auto& part : parts) {
    host::copy(to, part.data, part.bytes);
    to += part.bytes;
  }
  return {packed.back().get(), all};
}

// Scatters the received data among this host's ranks, in messages ordered by source host, then by
// source rank.
void Execution::spread(
    const std::vector<Part>& receives, const std::vector<std::vector<uint64_t>>& theirs,
    const std::vector<Block>& arrived) {
  std::vector<Message> hops;
  forOtherHosts([&](int host) {
    for (const int source : t_.hosts[host]) {
      const int rail = t_.railOf(source);
      if (rail != local()) {
        hops.push_back(hop(false, rail, receives[source].data, receives[source].bytes));
      }
    }
    if (!arrived[host]) {
      return;
    }
    size_t part = 0;
    char* from = arrived[host].get();
    for (const int source : onRail(host, local())) {
      for (int to = 0; to < localSize(); ++to, from += theirs[host][part], ++part) {
        if (to == local()) {
          host::copy(receives[source].data, from, receives[source].bytes);
        } else {
          hops.push_back(hop(true, to, from, theirs[host][part]));
        }
      }
    }
  });
  inside(hops);
}

}  // namespace torchcomms_pg::gloo
