// What every rank has for every other, between hosts.
#include <algorithm>
#include <numeric>
#include <utility>

#include "gloo/Execution.hpp"
#include "shm/Reduce.hpp"

namespace torchcomms_pg::gloo {

// Where every rank has a host of its own. The envelopes tell the sizes.
void Execution::exchangeStraight(
    const std::vector<Part>& sends, const std::vector<Part>& receives) {
  std::vector<std::shared_ptr<Parcel>> parcels;
  for (int peer = 0; peer < t_.size; ++peer) {
    for (const bool sending : {false, true}) {
      const auto& part = (sending ? sends : receives)[peer];
      auto signature = signature_;
      signature.countLow = static_cast<uint32_t>(part.bytes);
      signature.countHigh = static_cast<uint32_t>(part.bytes >> 32);
      if (peer != t_.rank) {
        parcels.push_back(comm_.lane_->post(
            {.signature = signature,
             .sending = sending,
             .peer = peer,
             .tag = tag_,
             .data = part.data,
             .bytes = part.bytes}));
      }
    }
  }
  checkOwn(sends[t_.rank], receives[t_.rank]);
  shm::copy(receives[t_.rank].data, sends[t_.rank].data, sends[t_.rank].bytes);
  finish(parcels);
}

void Execution::checkOwn(const Part& send, const Part& receive) const {
  if (send.bytes != receive.bytes) {
    throw shm::Failure(
        ncclInvalidUsage,
        comm_.inside_->segment().nameOf(local()) + " sends itself " + std::to_string(send.bytes) +
            " bytes and receives " + std::to_string(receive.bytes));
  }
}

// What goes to another host goes to the lane of its receiver inside this one, from there to the
// lane's counterpart, and from there to the receiver.
void Execution::exchange(
    const std::vector<Part>& sends, const std::vector<Part>& receives, bool sameSizes) {
  const int size = t_.size;
  if (size == hosts_) {
    return exchangeStraight(sends, receives);
  }
  // bytes[l * size + r]: from the l-th rank of this host to rank r.
  std::vector<uint64_t> bytes(localSize() * size);
  if (sameSizes) {
    std::ranges::fill(bytes, sends.front().bytes);
    inside({CollectiveKind::barrier, nullptr, nullptr, 0, ncclInt8, {}, 0});
  } else {
    std::vector<uint64_t> mine;
    for (const auto& part : sends) {
      mine.push_back(part.bytes);
    }
    inside({CollectiveKind::allGather, mine.data(), bytes.data(), mine.size(), ncclUint64, {}, 0});
  }
  const auto from = [&](int source, int rank) { return bytes[source * size + rank]; };

  // To the lanes of this host, and to its ranks. What one lane gets of a rank follows each other,
  // host by host.
  std::vector<Hop> hops;
  std::vector<std::vector<char>> packed(t_.lanes);
  for (int lane = 0; lane < t_.lanes; ++lane) {
    forOtherHosts([&](int host) {
      for (const int rank : onLane(host, lane)) {
        const auto* const data = static_cast<const char*>(sends[rank].data);
        packed[lane].insert(packed[lane].end(), data, data + sends[rank].bytes);
      }
    });
    if (lane != local()) {
      hops.push_back({true, lane, packed[lane].data(), packed[lane].size()});
    }
  }
  for (int peer = 0; peer < localSize(); ++peer) {
    const int rank = t_.inside()[peer];
    if (rank != t_.rank) {
      hops.push_back({true, peer, sends[rank].data, sends[rank].bytes});
    }
  }
  std::vector<std::vector<char>> carried(localSize());  // by source
  for (int source = 0; source < localSize(); ++source) {
    if (onLane() && source != local()) {
      size_t all = 0;
      forOtherHosts([&](int host) {
        for (const int rank : onLane(host, local())) {
          all += from(source, rank);
        }
      });
      carried[source].resize(all);
      hops.push_back({false, source, carried[source].data(), all});
    }
    const int rank = t_.inside()[source];
    if (rank != t_.rank) {
      hops.push_back({false, source, receives[rank].data, receives[rank].bytes});
    }
  }
  if (onLane()) {
    carried[local()] = std::move(packed[local()]);
  }
  inside(hops);
  checkOwn(sends[t_.rank], receives[t_.rank]);
  shm::copy(receives[t_.rank].data, sends[t_.rank].data, sends[t_.rank].bytes);

  // Between the hosts: the sizes, unless they are known, then the data.
  const auto here = onLane() ? onLane(host_, local()) : std::vector<int>();
  std::vector<std::vector<uint64_t>> theirs(hosts_);  // by source, then by receiver here
  std::vector<std::vector<char>> arrived(hosts_);
  if (onLane()) {
    std::vector<std::vector<uint64_t>> ours(hosts_);
    std::vector<std::vector<char>> leaving(hosts_);
    Step step(*this);
    forOtherHosts([&](int host) {
      theirs[host].assign(t_.hosts[host].size() * here.size(), sameSizes ? sends.front().bytes : 0);
      for (int source = 0; source < localSize(); ++source) {
        for (const int rank : onLane(host, local())) {
          ours[host].push_back(from(source, rank));
        }
      }
      if (!sameSizes) {
        step.receive(host, theirs[host].data(), theirs[host].size() * sizeof(uint64_t));
        step.send(host, ours[host].data(), ours[host].size() * sizeof(uint64_t));
      }
    });
    step.finish();
    std::vector<size_t> taken(localSize());
    forOtherHosts([&](int host) {
      for (int source = 0; source < localSize(); ++source) {
        size_t all = 0;
        for (const int rank : onLane(host, local())) {
          all += from(source, rank);
        }
        const char* const data = carried[source].data() + taken[source];
        leaving[host].insert(leaving[host].end(), data, data + all);
        taken[source] += all;
      }
      arrived[host].resize(std::accumulate(theirs[host].begin(), theirs[host].end(), size_t{0}));
      step.receive(host, arrived[host].data(), arrived[host].size());
      step.send(host, leaving[host].data(), leaving[host].size());
    });
    step.finish();
  }

  // From the lanes to the receivers: what has come for one follows each other, host by host and
  // rank by rank.
  std::vector<std::vector<char>> given(here.size());
  for (int host = 0; onLane() && host < hosts_; ++host) {
    size_t first = 0;
    for (size_t i = 0; i < theirs[host].size(); ++i) {
      auto& to = given[i % here.size()];
      const char* const data = arrived[host].data() + first;
      to.insert(to.end(), data, data + theirs[host][i]);
      first += theirs[host][i];
    }
  }
  size_t expected = 0;
  for (int rank = 0; rank < size; ++rank) {
    expected += t_.hostOf[rank] == host_ ? 0 : receives[rank].bytes;
  }
  std::vector<Hop> last;
  std::vector<char> mine;
  for (size_t i = 0; i < here.size(); ++i) {
    if (here[i] == t_.rank) {
      mine = std::move(given[i]);
    } else {
      last.push_back({true, t_.localOf[here[i]], given[i].data(), given[i].size()});
    }
  }
  if (!onLane()) {
    mine.resize(expected);
    last.push_back({false, t_.laneOf(t_.rank), mine.data(), expected});
  }
  if (!last.empty()) {
    inside(last);
  }
  if (mine.size() != expected) {
    throw shm::Failure(
        ncclInvalidUsage,
        "the ranks disagree: " + comm_.inside_->segment().nameOf(local()) + " expects " +
            std::to_string(expected) + " bytes of the ranks of other hosts, which send it " +
            std::to_string(mine.size()));
  }
  size_t first = 0;
  for (int host = 0; host < hosts_; ++host) {
    for (const int rank : host == host_ ? std::vector<int>() : t_.hosts[host]) {
      shm::copy(receives[rank].data, mine.data() + first, receives[rank].bytes);
      first += receives[rank].bytes;
    }
  }
}

}  // namespace torchcomms_pg::gloo
