// What each collective is made of, inside a host and between hosts.
//
// All-reduce is the hierarchical scheme of NCCL, Horovod and others: reduce-scatter inside the
// host, an all-reduce of each lane with its counterparts, all-gather inside the host, so that a
// byte crosses the wire as often as the best algorithm between hosts needs. Between hosts that is
// reduce-scatter followed by all-gather (Rabenseifner, "Optimization of collective reduction
// operations", 2004), straight between every two hosts.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <utility>

#include "gloo/Comm.hpp"
#include "shm/Api.hpp"
#include "shm/Reduce.hpp"

namespace torchcomms_pg::gloo {

namespace {

using shm::Collective;
using shm::CollectiveKind;

// Up to so many bytes in all, one rank of every host gets all hosts' inputs and reduces them: one
// step instead of two.
constexpr size_t kSmall = 64 << 10;

// Up to so much two hosts exchange all of their sums, rather than each reducing a half for both: as
// many bytes in one step. Above, adding twice as much takes longer than the step.
constexpr size_t kExchanged = 4 << 20;

// What the hosts work on at a time, so that the wire and the ranks of a host work together.
constexpr size_t kPiece = 4 << 20;

// Of messages inside a host, which belong to collectives; those of users are not negative.
constexpr int kInsideTag = -2;

char* at(void* base, size_t offset) {
  return static_cast<char*>(base) + offset;
}

const char* at(const void* base, size_t offset) {
  return static_cast<const char*>(base) + offset;
}

// Where the data of a collective goes on a link. Ranks that call different ones wait at different
// tags, so that none is given data of a size that it does not expect, which Gloo answers by ending
// the process; the envelopes tell them. A tag may come again: messages of one keep their order.
int dataTagOf(const shm::Signature& signature, int tag) {
  uint64_t hash = signature.kind | signature.types << 8 | signature.root << 16;
  hash = (hash * 0x9e3779b97f4a7c15u) ^ signature.countLow;
  hash = (hash * 0x9e3779b97f4a7c15u) ^ signature.countHigh;
  hash *= 0x9e3779b97f4a7c15u;
  return Link::kCollectiveDataTags + static_cast<int>(hash >> 45 << 10 | (tag & 1023));
}

}  // namespace

// One collective, as one rank executes it.
class Execution {
 public:
  Execution(Comm& comm, const shm::Signature& signature, int tag)
      : comm_(comm),
        t_(comm.topology()),
        signature_(signature),
        tag_(Link::kCollectiveTags + tag),
        dataTag_(dataTagOf(signature, tag)),
        hosts_(static_cast<int>(t_.hosts.size())),
        host_(t_.host()),
        announcedTo_(hosts_),
        announcedBy_(hosts_) {}

  void run(const Collective& c);
  void exchange(
      const std::vector<Part>& sends, const std::vector<Part>& receives, bool sameSizes);

 private:
  // Messages between this rank and its counterparts that are under way together.
  class Step {
   public:
    explicit Step(Execution& execution) : execution_(execution) {}
    void send(int host, const void* data, size_t bytes) {
      add(true, host, const_cast<void*>(data), bytes, execution_.announcedTo_);
    }
    void receive(int host, void* data, size_t bytes) {
      add(false, host, data, bytes, execution_.announcedBy_);
    }
    void finish() {
      execution_.finish(parcels_);
      parcels_.clear();
    }

   private:
    void add(bool sending, int host, void* data, size_t bytes, std::vector<bool>& announced) {
      parcels_.push_back(execution_.comm_.lane_->post(
          {.signature = execution_.signature_,
           .sending = sending,
           .peer = host,
           .tag = execution_.tag_,
           .data = data,
           .bytes = bytes,
           .dataTag = execution_.dataTag_,
           .announced = !announced[host]}));
      announced[host] = true;
    }

    Execution& execution_;
    std::vector<std::shared_ptr<Parcel>> parcels_;
  };

  using Block = Scratch::Block;
  Block block(size_t bytes) { return comm_.scratch_.take(bytes); }

  // A message inside the host.
  struct Hop {
    bool sending;
    int local;
    void* data;
    size_t bytes;
  };

  // A piece of an all-reduce or a reduction, on its way.
  struct Piece {
    size_t count = 0;  // of one lane's slice, of which there are t_.lanes
    const char* input = nullptr;
    char* output = nullptr;
    size_t outputBytes = 0;
    Block padded;   // input and output where the lanes' slices do not fit
    Block reduced;  // this lane's slice of the host's sum
    const char* slice = nullptr;
    Block received;
    std::unique_ptr<Step> step;
  };

  void inside(Collective part) {
    part.whole = &signature_;
    comm_.inside_->run(part);
  }
  void inside(const std::vector<Hop>& hops);
  void finish(const std::vector<std::shared_ptr<Parcel>>& parcels);

  void allReduce(const Collective& c);
  void allReduceSmall(const Collective& c);
  void allReduceInPieces(const Collective& c);
  void reduce(const Collective& c);
  void reduceScatter(const Collective& c);
  void allGather(const Collective& c);
  void broadcast(const Collective& c);
  void broadcastSmall(const Collective& c);
  void gather(const Collective& c);
  void scatter(const Collective& c);
  void barrier();
  void checkOwn(const Part& send, const Part& receive) const;
  void exchangeStraight(const std::vector<Part>& sends, const std::vector<Part>& receives);

  std::deque<Piece> cut(const Collective& c);
  void reduceInside(const Collective& c, Piece& piece);
  void combine(
      const Collective& c, void* output, std::vector<const void*> inputs, size_t count) const;
  int halvings(const Collective& c) const;
  Collective toInside(const Collective& c) const;
  std::vector<int> onLane(int host, int lane) const;
  template <class Body>
  void forOtherHosts(const Body& body) const {
    for (int i = 1; i < hosts_; ++i) {
      body((host_ + i) % hosts_);
    }
  }

  bool onLane() const { return comm_.lane_ != nullptr; }
  int local() const { return t_.local(); }
  int localSize() const { return static_cast<int>(t_.inside().size()); }
  // The first element of `count` that host `host` reduces.
  size_t begin(size_t count, int host) const { return count * host / hosts_; }

  Comm& comm_;
  const Topology& t_;
  const shm::Signature signature_;
  const int tag_;
  const int dataTag_;
  const int hosts_;
  const int host_;
  std::vector<bool> announcedTo_;  // by host: it has been sent this collective's envelope
  std::vector<bool> announcedBy_;
};

void Comm::run(const Collective& collective, const Place& place) {
  execute(place, [&] { runHere(collective, place); });
}

void Comm::runHere(const Collective& collective, const Place& place) {
  Execution(*this, shm::signatureOf(collective), place.tag).run(collective);
}

void Comm::exchange(
    const std::vector<Part>& sends,
    const std::vector<Part>& receives,
    ncclDataType_t type,
    const Place& place) {
  const Collective c{CollectiveKind::allToAll, nullptr, nullptr, 0, type, {}, 0};
  execute(place, [&] {
    Execution(*this, shm::signatureOf(c), place.tag).exchange(sends, receives, false);
  });
}

void Execution::run(const Collective& c) {
  switch (c.kind) {
    case CollectiveKind::allReduce: return allReduce(c);
    case CollectiveKind::reduce: return reduce(c);
    case CollectiveKind::reduceScatter: return reduceScatter(c);
    case CollectiveKind::split:
    case CollectiveKind::allGather: return allGather(c);
    case CollectiveKind::broadcast: return broadcast(c);
    case CollectiveKind::gather: return gather(c);
    case CollectiveKind::scatter: return scatter(c);
    case CollectiveKind::barrier: return barrier();
    case CollectiveKind::allToAll: {
      const size_t bytes = c.count * elementSize(c.type);
      std::vector<Part> sends, receives;
      for (int peer = 0; peer < t_.size; ++peer) {
        sends.push_back({const_cast<char*>(at(c.input, peer * bytes)), bytes});
        receives.push_back({at(c.output, peer * bytes), bytes});
      }
      return exchange(sends, receives, true);
    }
    case CollectiveKind::window: return;
  }
}

void Execution::finish(const std::vector<std::shared_ptr<Parcel>>& parcels) {
  if (parcels.empty()) {
    return;
  }
  comm_.runWatched([&] {
    for (const auto& parcel : parcels) {
      comm_.lane_->complete(*parcel, /*late=*/true);
    }
  });
}

void Execution::inside(const std::vector<Hop>& hops) {
  const auto& api = shm::api();
  api.groupStart();
  for (const auto& hop : hops) {
    const Message message{
        .buffer = hop.data, .count = hop.bytes, .peer = hop.local, .tag = kInsideTag};
    (hop.sending ? api.sendTagged : api.recvTagged)(message, comm_.members_.inside, nullptr);
  }
  const auto result = api.groupEnd();
  if (result != ncclSuccess) {
    const auto& segment = comm_.inside_->segment();
    throw segment.failed() ? segment.failure()
                           : shm::Failure(result, api.getLastError(comm_.members_.inside));
  }
}

// The ranks of a host whose data `lane` carries.
std::vector<int> Execution::onLane(int host, int lane) const {
  std::vector<int> ranks;
  for (const int rank : t_.hosts[host]) {
    if (t_.laneOf(rank) == lane) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

// Averages are divided once, when all hosts' sums are added. In float16, whose range a host's sum
// may leave, inputs are divided by a power of two before, which loses nothing of normal numbers.
int Execution::halvings(const Collective& c) const {
  size_t largest = 1;
  for (const auto& members : t_.hosts) {
    largest = std::max(largest, members.size());
  }
  const bool needed = c.type == ncclFloat16 && c.op.reduction == ncclAvg && !c.op.scaled;
  return needed ? std::bit_width(largest - 1) : 0;
}

Collective Execution::toInside(const Collective& c) const {
  auto part = c;
  if (c.op.scaled || c.op.reduction != ncclAvg) {
    return part;
  }
  part.op.reduction = ncclSum;
  if (const int halved = halvings(c); halved > 0) {
    const auto factor = static_cast<uint16_t>((15 - halved) << 10);  // 2 ** -halved in float16
    part.op.scaled = true;
    std::memcpy(part.op.scalar.data(), &factor, sizeof factor);
  }
  return part;
}

void Execution::combine(
    const Collective& c, void* output, std::vector<const void*> inputs, size_t count) const {
  // ncclRedOp_t and Reduction list the same operations in the same order.
  const auto reduction =
      c.op.scaled ? shm::Reduction::sum : static_cast<shm::Reduction>(c.op.reduction);
  shm::reduce(
      c.type,
      reduction,
      output,
      inputs.data(),
      static_cast<int>(inputs.size()),
      count,
      /*divisor=*/std::ldexp(t_.size, -halvings(c)));
}

void Execution::allReduce(const Collective& c) {
  if (hosts_ * c.count * elementSize(c.type) <= kSmall) {
    allReduceSmall(c);
  } else {
    allReduceInPieces(c);
  }
}

void Execution::allReduceSmall(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const auto sums = block(local() == 0 ? hosts_ * bytes : 0);
  Step step(*this);
  if (local() == 0) {
    forOtherHosts([&](int host) { step.receive(host, at(sums.data(), host * bytes), bytes); });
  }
  auto part = toInside(c);
  part.kind = CollectiveKind::reduce;
  part.output = local() == 0 ? at(sums.data(), host_ * bytes) : nullptr;
  inside(part);
  if (local() == 0) {
    std::vector<const void*> inputs;
    for (int host = 0; host < hosts_; ++host) {
      inputs.push_back(at(sums.data(), host * bytes));
    }
    forOtherHosts([&](int host) { step.send(host, inputs[host_], bytes); });
    step.finish();
    combine(c, c.output, std::move(inputs), c.count);
  }
  inside({CollectiveKind::broadcast, c.output, c.output, c.count, c.type, {}, 0});
}

std::deque<Execution::Piece> Execution::cut(const Collective& c) {
  const size_t element = elementSize(c.type);
  const size_t most = std::max<size_t>(1, kPiece / element / t_.lanes) * t_.lanes;
  std::deque<Piece> pieces;
  for (size_t first = 0; first < c.count; first += most) {
    const size_t count = std::min(most, c.count - first);
    auto& piece = pieces.emplace_back();
    piece.count = (count + t_.lanes - 1) / t_.lanes;
    piece.input = at(c.input, first * element);
    piece.output = c.output == nullptr ? nullptr : at(c.output, first * element);
    piece.outputBytes = count * element;
  }
  return pieces;
}

void Execution::reduceInside(const Collective& c, Piece& piece) {
  const size_t bytes = piece.count * elementSize(c.type);
  const char* input = piece.input;
  if (piece.outputBytes != t_.lanes * bytes) {
    piece.padded = block(t_.lanes * bytes);
    std::memcpy(piece.padded.data(), input, piece.outputBytes);
    input = piece.padded.data();
  }
  auto part = toInside(c);
  part.count = piece.count;
  if (localSize() == 1 && !part.op.scaled) {
    piece.slice = input;
    return;
  }
  if (onLane()) {
    piece.reduced = block(bytes);
    piece.slice = piece.reduced.data();
  }
  part.output = piece.reduced.data();
  if (t_.lanes == localSize()) {
    part.kind = CollectiveKind::reduceScatter;
    part.input = input;
    return inside(part);
  }
  part.kind = CollectiveKind::reduce;
  for (part.root = 0; part.root < t_.lanes; ++part.root) {
    part.input = at(input, part.root * bytes);
    inside(part);
  }
}

void Execution::allReduceInPieces(const Collective& c) {
  const size_t element = elementSize(c.type);
  auto pieces = cut(c);
  const auto outputOf = [](Piece& piece) {
    return piece.padded ? piece.padded.data() : piece.output;
  };
  const auto sliceOf = [&](Piece& piece) {
    return at(outputOf(piece), local() * piece.count * element);
  };
  // Who reduces what of a lane's slice: every host a part, or all of two hosts everything.
  const bool all = hosts_ == 2 && c.count * element <= kExchanged;
  const auto first = [&](size_t count, int host) { return all ? 0 : begin(count, host); };
  const auto size = [&](size_t count, int host) {
    return all ? count : begin(count, host + 1) - begin(count, host);
  };
  const auto start = [&](Piece& piece) {
    if (onLane()) {
      const size_t mine = size(piece.count, host_) * element;
      piece.received = block(hosts_ * mine);
      piece.step = std::make_unique<Step>(*this);
      forOtherHosts([&](int host) {
        piece.step->receive(host, at(piece.received.data(), host * mine), mine);
      });
    }
    reduceInside(c, piece);
    if (onLane()) {
      forOtherHosts([&](int host) {
        const char* const data = at(piece.slice, first(piece.count, host) * element);
        piece.step->send(host, data, size(piece.count, host) * element);
      });
    }
  };
  const auto collect = [&](Piece& piece) {
    if (!onLane()) {
      return;
    }
    piece.step->finish();
    const size_t from = first(piece.count, host_) * element;
    const size_t mine = size(piece.count, host_);
    std::vector<const void*> inputs;
    for (int host = 0; host < hosts_; ++host) {
      inputs.push_back(
          host == host_ ? at(piece.slice, from)
                        : at(piece.received.data(), host * mine * element));
    }
    char* const slice = sliceOf(piece);
    combine(c, at(slice, from), std::move(inputs), mine);
    forOtherHosts([&](int host) {
      if (!all) {
        const size_t theirs = size(piece.count, host) * element;
        piece.step->receive(host, at(slice, first(piece.count, host) * element), theirs);
        piece.step->send(host, at(slice, from), mine * element);
      }
    });
  };
  const auto end = [&](Piece& piece) {
    if (onLane()) {
      piece.step->finish();
    }
    char* const output = outputOf(piece);
    if (t_.lanes == localSize()) {
      inside({CollectiveKind::allGather, sliceOf(piece), output, piece.count, c.type, {}, 0});
    } else {
      for (int lane = 0; lane < t_.lanes; ++lane) {
        char* const slice = at(output, lane * piece.count * element);
        inside({CollectiveKind::broadcast, slice, slice, piece.count, c.type, {}, lane});
      }
    }
    if (piece.padded) {
      std::memcpy(piece.output, output, piece.outputBytes);
    }
    piece = {};
  };
  for (size_t i = 0; i < pieces.size() + 2; ++i) {
    if (i < pieces.size()) start(pieces[i]);
    if (i >= 1 && i - 1 < pieces.size()) collect(pieces[i - 1]);
    if (i >= 2) end(pieces[i - 2]);
  }
}

void Execution::reduce(const Collective& c) {
  const size_t element = elementSize(c.type);
  const int to = t_.hostOf[c.root];
  const int root = t_.localOf[c.root];
  auto pieces = cut(c);
  if (pieces.empty()) {
    return barrier();
  }
  const auto start = [&](Piece& piece) {
    reduceInside(c, piece);
    if (!onLane()) {
      return;
    }
    const size_t bytes = piece.count * element;
    piece.step = std::make_unique<Step>(*this);
    if (host_ != to) {
      return piece.step->send(to, piece.slice, bytes);
    }
    piece.received = block(hosts_ * bytes);
    forOtherHosts([&](int host) {
      piece.step->receive(host, at(piece.received.data(), host * bytes), bytes);
    });
  };
  const auto end = [&](Piece& piece) {
    if (onLane()) {
      piece.step->finish();
    }
    if (host_ != to) {
      piece = {};
      return;
    }
    const size_t bytes = piece.count * element;
    const auto result = block(t_.rank == c.root ? t_.lanes * bytes : onLane() ? bytes : 0);
    std::vector<Hop> hops;
    if (onLane()) {
      std::vector<const void*> inputs;
      for (int host = 0; host < hosts_; ++host) {
        inputs.push_back(host == host_ ? piece.slice : at(piece.received.data(), host * bytes));
      }
      char* const slice = at(result.data(), t_.rank == c.root ? local() * bytes : 0);
      combine(c, slice, std::move(inputs), piece.count);
      if (t_.rank != c.root) {
        hops.push_back({true, root, slice, bytes});
      }
    }
    if (t_.rank == c.root) {
      for (int lane = 0; lane < t_.lanes; ++lane) {
        if (lane != root) {
          hops.push_back({false, lane, at(result.data(), lane * bytes), bytes});
        }
      }
    }
    inside(hops);
    if (t_.rank == c.root) {
      std::memcpy(piece.output, result.data(), piece.outputBytes);
    }
    piece = {};
  };
  for (size_t i = 0; i < pieces.size() + 1; ++i) {
    if (i < pieces.size()) start(pieces[i]);
    if (i >= 1) end(pieces[i - 1]);
  }
}

void Execution::reduceScatter(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  if (bytes == 0) {
    return barrier();
  }
  // What the lanes carry, by lane: the parts for the ranks of every host in turn.
  std::vector<int> order;
  for (int lane = 0; lane < t_.lanes; ++lane) {
    for (int host = 0; host < hosts_; ++host) {
      std::ranges::copy(onLane(host, lane), std::back_inserter(order));
    }
  }
  std::vector<int> mine;  // ranks, as they follow each other on this lane
  std::vector<size_t> firstOf(hosts_);
  for (int host = 0; onLane() && host < hosts_; ++host) {
    firstOf[host] = mine.size();
    std::ranges::copy(onLane(host, local()), std::back_inserter(mine));
  }
  const auto sums = block(mine.size() * bytes);
  auto part = toInside(c);
  if (t_.even()) {
    Block packed;
    if (!std::ranges::is_sorted(order)) {
      packed = block(order.size() * bytes);
      for (size_t i = 0; i < order.size(); ++i) {
        std::memcpy(at(packed.data(), i * bytes), at(c.input, order[i] * bytes), bytes);
      }
      part.input = packed.data();
    }
    part.count = hosts_ * c.count;
    part.output = sums.data();
    inside(part);
  } else {
    part.kind = CollectiveKind::reduce;
    for (const int rank : order) {
      part.root = t_.laneOf(rank);
      part.input = at(c.input, rank * bytes);
      const auto found = std::ranges::find(mine, rank);
      part.output = found == mine.end() ? nullptr : at(sums.data(), (found - mine.begin()) * bytes);
      inside(part);
    }
  }
  std::vector<Hop> hops;
  Block results;
  if (onLane()) {
    const auto here = onLane(host_, local());
    const size_t ours = here.size() * bytes;
    const auto received = block(hosts_ * ours);
    Step step(*this);
    forOtherHosts([&](int host) {
      const size_t theirs = (host + 1 < hosts_ ? firstOf[host + 1] : mine.size()) - firstOf[host];
      step.receive(host, at(received.data(), host * ours), ours);
      step.send(host, at(sums.data(), firstOf[host] * bytes), theirs * bytes);
    });
    step.finish();
    results = block(ours);
    for (size_t i = 0; i < here.size(); ++i) {
      std::vector<const void*> inputs;
      for (int host = 0; host < hosts_; ++host) {
        inputs.push_back(
            host == host_ ? at(sums.data(), (firstOf[host] + i) * bytes)
                          : at(received.data(), host * ours + i * bytes));
      }
      const bool own = here[i] == t_.rank;
      void* const to = own ? c.output : at(results.data(), i * bytes);
      combine(c, to, std::move(inputs), c.count);
      if (!own) {
        hops.push_back({true, t_.localOf[here[i]], to, bytes});
      }
    }
  } else {
    hops.push_back({false, t_.laneOf(t_.rank), c.output, bytes});
  }
  if (!hops.empty()) {
    inside(hops);
  }
}

void Execution::allGather(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const auto place = [&](int rank) { return at(c.output, rank * bytes); };
  Step step(*this);
  std::vector<std::vector<char>> received(hosts_);
  const auto receive = [&] {
    forOtherHosts([&](int host) {
      const auto theirs = onLane(host, local());
      if (theirs.size() == 1) {
        return step.receive(host, place(theirs.front()), bytes);
      }
      received[host].resize(theirs.size() * bytes);
      step.receive(host, received[host].data(), received[host].size());
    });
  };
  // A rank that has its lane to itself sends before its host has come together.
  const auto here = onLane() ? onLane(host_, local()) : std::vector<int>();
  const bool alone = here.size() == 1;
  if (alone) {
    receive();
    forOtherHosts([&](int host) { step.send(host, c.input, bytes); });
  }
  if (t_.contiguous(host_)) {
    inside({c.kind == CollectiveKind::split ? CollectiveKind::allGather : c.kind,
            c.input, place(t_.inside().front()), c.count, c.type, {}, 0});
  } else {
    const auto gathered = block(localSize() * bytes);
    inside({CollectiveKind::allGather, c.input, gathered.data(), c.count, c.type, {}, 0});
    for (int i = 0; i < localSize(); ++i) {
      shm::copy(place(t_.inside()[i]), at(gathered.data(), i * bytes), bytes);
    }
  }
  std::vector<char> packed;
  if (onLane() && !alone) {
    receive();
    for (const int rank : here) {
      packed.insert(packed.end(), place(rank), place(rank) + bytes);
    }
    forOtherHosts([&](int host) { step.send(host, packed.data(), packed.size()); });
  }
  step.finish();
  for (int host = 0; onLane() && host < hosts_; ++host) {
    for (size_t i = 0; i * bytes < received[host].size() && bytes > 0; ++i) {
      std::memcpy(place(onLane(host, local())[i]), at(received[host].data(), i * bytes), bytes);
    }
  }
  forOtherHosts([&](int host) {
    const bool sameLanes = t_.lanes == localSize() &&
                           static_cast<int>(t_.hosts[host].size()) == t_.lanes;
    if (sameLanes && t_.contiguous(host)) {
      char* const first = place(t_.hosts[host].front());
      inside({CollectiveKind::allGather, at(first, local() * bytes), first, c.count, c.type, {}, 0});
      return;
    }
    for (const int rank : t_.hosts[host]) {
      inside({CollectiveKind::broadcast, place(rank), place(rank), c.count, c.type, {}, t_.laneOf(rank)});
    }
  });
}

void Execution::broadcast(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  if (bytes <= kSmall) {
    return broadcastSmall(c);
  }
  // The root's host scatters a lane's slice of a piece over the hosts, which give it to each other:
  // no host sends more than twice the data (van de Geijn's scatter and all-gather).
  const int from = t_.hostOf[c.root];
  const void* const source = t_.rank == c.root ? c.input : c.output;
  const size_t pieces = (bytes + kPiece - 1) / kPiece;
  struct Slice {
    size_t first;
    size_t bytes;
  };
  const auto slice = [&](size_t piece, int lane) -> Slice {
    const size_t first = piece * kPiece;
    const size_t all = std::min(kPiece, bytes - first);
    const size_t begins = all * lane / t_.lanes;
    return {first + begins, all * (lane + 1) / t_.lanes - begins};
  };
  const auto part = [&](const Slice& of, int host) -> Slice {
    const size_t begins = begin(of.bytes, host);
    return {of.first + begins, begin(of.bytes, host + 1) - begins};
  };
  // Whatever another host sends goes to where it stays, so that it can come at any time.
  Step sends(*this);
  std::vector<std::unique_ptr<Step>> ownParts, otherParts;
  for (size_t i = 0; onLane() && host_ != from && i < pieces; ++i) {
    const auto mine = slice(i, local());
    ownParts.push_back(std::make_unique<Step>(*this));
    otherParts.push_back(std::make_unique<Step>(*this));
    const auto receive = [&](Step& step, int host, const Slice& what) {
      step.receive(host, at(c.output, what.first), what.bytes);
    };
    receive(*ownParts.back(), from, part(mine, host_));
    receive(*otherParts.back(), from, part(mine, from));
    forOtherHosts([&](int host) {
      if (host != from) receive(*otherParts.back(), host, part(mine, host));
    });
  }
  for (size_t i = 0; i < pieces; ++i) {
    const auto mine = slice(i, onLane() ? local() : 0);
    if (host_ == from) {
      const size_t first = i * kPiece;
      inside({CollectiveKind::broadcast, at(source, first), at(c.output, first),
              std::min(kPiece, bytes - first), ncclInt8, {}, t_.localOf[c.root]});
      if (onLane()) {
        forOtherHosts([&](int host) {
          for (const int which : {host, from}) {
            const auto what = part(mine, which);
            sends.send(host, at(source, what.first), what.bytes);
          }
        });
      }
      continue;
    }
    if (onLane()) {
      ownParts[i]->finish();
      const auto what = part(mine, host_);
      forOtherHosts([&](int host) {
        if (host != from) sends.send(host, at(c.output, what.first), what.bytes);
      });
      otherParts[i]->finish();
    }
    for (int lane = 0; lane < t_.lanes; ++lane) {
      const auto [first, size] = slice(i, lane);
      inside({CollectiveKind::broadcast, at(c.output, first), at(c.output, first), size, ncclInt8,
              {}, lane});
    }
  }
  sends.finish();
}

void Execution::broadcastSmall(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const int from = t_.hostOf[c.root];
  const int lane = t_.laneOf(c.root);
  Step step(*this);
  if (host_ != from && local() == lane) {
    step.receive(from, c.output, bytes);
    step.finish();
  }
  const auto send = [&] {
    forOtherHosts([&](int host) {
      step.send(host, t_.rank == c.root ? c.input : c.output, bytes);
    });
  };
  const int root = host_ == from ? t_.localOf[c.root] : lane;
  if (t_.rank == c.root && local() == lane) {
    send();
  }
  inside({CollectiveKind::broadcast, t_.rank == c.root ? c.input : c.output, c.output, c.count,
          c.type, {}, root});
  if (host_ == from && t_.rank != c.root && local() == lane) {
    send();
  }
  step.finish();
}

void Execution::gather(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const int to = t_.hostOf[c.root];
  const int lane = t_.laneOf(c.root);
  const int root = t_.localOf[c.root];
  const bool isRoot = t_.rank == c.root;
  const bool port = local() == lane;
  // Of this host, for the one who passes it on.
  std::vector<char> own(isRoot || port ? localSize() * bytes : 0);
  inside({CollectiveKind::gather, c.input, own.data(), c.count, c.type, {}, host_ == to ? root : lane});
  Step step(*this);
  if (host_ != to) {
    if (port) {
      step.send(to, own.data(), own.size());
      step.finish();
    }
    return;
  }
  std::vector<std::vector<char>> of(hosts_);
  std::vector<Hop> hops;
  forOtherHosts([&](int host) {
    if (isRoot || port) {
      of[host].resize(t_.hosts[host].size() * bytes);
    }
    if (port) {
      step.receive(host, of[host].data(), of[host].size());
    }
    if (isRoot != port) {
      hops.push_back({port, port ? root : lane, of[host].data(), of[host].size()});
    }
  });
  step.finish();
  if (!hops.empty()) {
    inside(hops);
  }
  if (isRoot) {
    of[host_] = std::move(own);
    for (int rank = 0; rank < t_.size; ++rank) {
      shm::copy(
          at(c.output, rank * bytes), at(of[t_.hostOf[rank]].data(), t_.localOf[rank] * bytes), bytes);
    }
  }
}

void Execution::scatter(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const int from = t_.hostOf[c.root];
  const int lane = t_.laneOf(c.root);
  const int root = t_.localOf[c.root];
  const bool isRoot = t_.rank == c.root;
  const bool port = local() == lane;
  std::vector<std::vector<char>> of(hosts_);
  const auto resize = [&](int host) { of[host].resize(t_.hosts[host].size() * bytes); };
  if (isRoot) {
    for (int host = 0; host < hosts_; ++host) {
      resize(host);
    }
    for (int rank = 0; rank < t_.size; ++rank) {
      shm::copy(
          at(of[t_.hostOf[rank]].data(), t_.localOf[rank] * bytes), at(c.input, rank * bytes), bytes);
    }
  }
  Step step(*this);
  if (host_ != from && port) {
    resize(host_);
    step.receive(from, of[host_].data(), of[host_].size());
    step.finish();
  }
  inside({CollectiveKind::scatter, of[host_].data(), c.output, c.count, c.type, {},
          host_ == from ? root : lane});
  if (host_ != from) {
    return;
  }
  std::vector<Hop> hops;
  forOtherHosts([&](int host) {
    if (port) {
      resize(host);
    }
    if (isRoot != port) {
      hops.push_back({isRoot, isRoot ? lane : root, of[host].data(), of[host].size()});
    }
  });
  if (!hops.empty()) {
    inside(hops);
  }
  if (port) {
    forOtherHosts([&](int host) { step.send(host, of[host].data(), of[host].size()); });
  }
  step.finish();
}

// The ranks of a host come together, then one of every host, then those of a host again.
void Execution::barrier() {
  const Collective here{CollectiveKind::barrier, nullptr, nullptr, 0, ncclInt8, {}, 0};
  inside(here);
  if (local() == 0) {
    Step step(*this);
    forOtherHosts([&](int host) {
      step.receive(host, nullptr, 0);
      step.send(host, nullptr, 0);
    });
    step.finish();
  }
  inside(here);
}

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
        comm_.inside_->segment().nameOf(local()) + " sends itself " +
            std::to_string(send.bytes) + " bytes and receives " + std::to_string(receive.bytes));
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
    Step step(*this);
    forOtherHosts([&](int host) {
      theirs[host].assign(
          t_.hosts[host].size() * here.size(), sameSizes ? sends.front().bytes : 0);
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
    std::vector<std::vector<char>> leaving(hosts_);
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
