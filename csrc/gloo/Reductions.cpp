// Reductions between hosts.
//
// All-reduce is the hierarchical scheme of NCCL, Horovod and others: reduce-scatter inside each
// host, all-reduce of each rail between hosts, all-gather inside each host. A byte crosses the wire
// only as often as the best algorithm between hosts needs. Between hosts, a large all-reduce is a
// reduce-scatter followed by an all-gather (Rabenseifner, "Optimization of collective reduction
// operations", 2004), with direct messages between every two hosts.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "gloo/Execution.hpp"
#include "host/Reduce.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Bytes up to which two hosts send each other all of their sums, and both reduce everything. If
// each host reduced one half, the same bytes would cross the wire in two steps instead of one.
// Above this size, adding twice as much takes longer than the second step.
constexpr size_t kExchanged = 4 << 20;

// Returns whether the sum from which an average is made may leave the range of its type.
bool mayLeaveRange(const Collective& c) {
  return c.type == ncclFloat16 && c.op.reduction == ncclAvg && !c.op.scaled;
}

}  // namespace

// Returns how often inputs are halved before they are added. Averages are divided once, when all
// hosts' sums are added. Until then, a sum could leave the range of float16, so the inputs are
// divided by a power of two. This is exact unless the quotient is subnormal.
int Execution::halvings(const Collective& c) const {
  size_t largest = 1;
  for (const auto& members : t_.hosts) {
    largest = std::max(largest, members.size());
  }
  return mayLeaveRange(c) ? std::bit_width(largest - 1) : 0;
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
    const Collective& c, void* output, std::vector<const void*> inputs, size_t count,
    bool whole) const {
  const bool adds = c.op.scaled || (!whole && c.op.reduction == ncclAvg);
  host::reduce(
      c.type, adds ? ncclSum : c.op.reduction, output, inputs.data(),
      static_cast<int>(inputs.size()), count,
      /*divisor=*/std::ldexp(t_.size, -halvings(c)));
}

void Execution::allReduceSmall(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  const auto reduced = [&](void* sum) {
    auto part = toInside(c);
    part.kind = Kind::reduce;
    part.output = sum;
    inside(part);
  };
  if (local() != 0) {
    reduced(nullptr);
  } else if (hosts_ > kStraight && !mayLeaveRange(c)) {
    recursiveDoubling(c, reduced);
  } else {
    const auto sums = block(hosts_ * bytes);
    Step step(*this);
    forOtherHosts([&](int host) { step.receive(host, at(sums.get(), host * bytes), bytes); });
    reduced(at(sums.get(), host_ * bytes));
    std::vector<const void*> inputs;
    for (int host = 0; host < hosts_; ++host) {
      inputs.push_back(at(sums.get(), host * bytes));
    }
    forOtherHosts([&](int host) { step.send(host, inputs[host_], bytes); });
    step.finish();
    combine(c, c.output, std::move(inputs), c.count);
  }
  inside({Kind::broadcast, c.output, c.output, c.count, c.type});
}

// All-reduces by recursive doubling among the first ranks of the hosts (Thakur, Rabenseifner and
// Gropp, "Optimization of collective communication operations in MPICH", 2005). Each host beyond
// the largest power of two sends its sum to a lower host and receives the result. Partners add the
// lower host's sum first, so that both get the same bits. `reduced` writes this host's sum.
void Execution::recursiveDoubling(const Collective& c, const std::function<void(void*)>& reduced) {
  const size_t bytes = c.count * elementSize(c.type);
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(hosts_)));
  std::vector<int> partners;
  if (host_ >= power) {
    partners = {host_ - power};
  } else {
    if (host_ + power < hosts_) partners = {host_ + power};
    for (int distance = 1; distance < power; distance *= 2) {
      partners.push_back(host_ ^ distance);
    }
  }
  // the partners' sums, then this host's sum of each step
  const auto sums = block((2 * partners.size() + 1) * bytes);
  char* own = at(sums.get(), partners.size() * bytes);
  std::deque<Step> steps;
  for (size_t i = 0; i < partners.size(); ++i) {
    steps.emplace_back(*this).receive(partners[i], at(sums.get(), i * bytes), bytes);
  }
  reduced(own);
  for (size_t i = 0; i < partners.size(); ++i) {
    char* const theirs = at(sums.get(), i * bytes);
    if (partners[i] < power) {
      steps[i].send(partners[i], own, bytes);
    }
    steps[i].finish();
    if (host_ >= power) {
      std::memcpy(c.output, theirs, bytes);  // the partner has sent the result
      return;
    }
    const bool last = i + 1 == partners.size();
    const bool lower = host_ < partners[i];
    std::vector<const void*> inputs{lower ? own : theirs, lower ? theirs : own};
    own = at(own, bytes);
    combine(c, last ? c.output : own, std::move(inputs), c.count, /*whole=*/last);
  }
  if (host_ + power < hosts_) {
    Step step(*this);
    step.send(host_ + power, c.output, bytes);
    step.finish();
  }
}

std::deque<Execution::Piece> Execution::cut(const Collective& c) {
  const size_t element = elementSize(c.type);
  const size_t most = std::max<size_t>(1, kPiece / element / t_.rails) * t_.rails;
  std::deque<Piece> pieces;
  for (size_t first = 0; first < c.count; first += most) {
    const size_t count = std::min(most, c.count - first);
    auto& piece = pieces.emplace_back();
    piece.count = (count + t_.rails - 1) / t_.rails;
    piece.input = at(c.input, first * element);
    piece.output = c.output == nullptr ? nullptr : at(c.output, first * element);
    piece.outputBytes = count * element;
  }
  return pieces;
}

void Execution::reduceInside(const Collective& c, Piece& piece) {
  const size_t bytes = piece.count * elementSize(c.type);
  const char* input = piece.input;
  if (piece.outputBytes != t_.rails * bytes) {
    piece.padded = block(t_.rails * bytes);
    std::memcpy(piece.padded.get(), input, piece.outputBytes);
    input = piece.padded.get();
  }
  auto part = toInside(c);
  part.count = piece.count;
  if (localSize() == 1 && !part.op.scaled) {
    piece.slice = input;
    return;
  }
  if (onRail()) {
    piece.reduced = block(bytes);
    piece.slice = piece.reduced.get();
  }
  part.output = piece.reduced.get();
  if (t_.rails == localSize()) {
    part.kind = Kind::reduceScatter;
    part.input = input;
    return inside(part);
  }
  part.kind = Kind::reduce;
  for (part.root = 0; part.root < t_.rails; ++part.root) {
    part.input = at(input, part.root * bytes);
    inside(part);
  }
}

// Executes an all-reduce or a reduce. The two differ only in the ranks that get the reduced parts.
void Execution::reduceInPieces(const Collective& c) {
  const size_t element = elementSize(c.type);
  const bool rooted = c.kind == Kind::reduce;
  const int to = rooted ? t_.hostOf[c.root] : -1;
  const bool isRoot = rooted && t_.rank == c.root;
  const bool few = c.count * element * hosts_ <= kSmall;
  // Decides which host reduces which part of a rail's slice. In general, each host reduces one
  // part, and a second step sends the results. In a single step, both of two hosts reduce
  // everything (`all`), or the root's host does (`toRoot`).
  const bool toRoot = rooted && (hosts_ == 2 || few);
  const bool all = !rooted && hosts_ == 2 && c.count * element <= kExchanged;
  const auto reduces = [&](int host) { return !toRoot || host == to; };
  const auto first = [&](size_t count, int host) { return all || toRoot ? 0 : begin(count, host); };
  const auto size = [&](size_t count, int host) {
    return all || toRoot ? count : begin(count, host + 1) - begin(count, host);
  };
  const auto resultOf = [&](Piece& piece) {
    return rooted ? piece.result.get() : piece.padded ? piece.padded.get() : piece.output;
  };
  const auto sliceOf = [&](Piece& piece) {
    return at(resultOf(piece), rooted && !isRoot ? 0 : local() * piece.count * element);
  };
  const auto start = [&](Piece& piece) {
    if (onRail()) {
      piece.step = std::make_unique<Step>(*this);
    }
    if (onRail() && reduces(host_)) {
      const size_t mine = size(piece.count, host_) * element;
      piece.received = block(hosts_ * mine);
      forOtherHosts([&](int host) {
        piece.step->receive(host, at(piece.received.get(), host * mine), mine);
      });
    }
    reduceInside(c, piece);
    if (onRail()) {
      forOtherHosts([&](int host) {
        const char* const data = at(piece.slice, first(piece.count, host) * element);
        if (reduces(host)) piece.step->send(host, data, size(piece.count, host) * element);
      });
    }
  };
  const auto collect = [&](Piece& piece) {
    if (rooted && (onRail() || isRoot)) {
      piece.result = block((isRoot ? t_.rails : 1) * piece.count * element);
    }
    if (!onRail()) {
      return;
    }
    piece.step->finish();
    if (!reduces(host_)) {
      return;
    }
    const size_t from = first(piece.count, host_) * element;
    const size_t mine = size(piece.count, host_);
    std::vector<const void*> inputs;
    for (int host = 0; host < hosts_; ++host) {
      inputs.push_back(
          host == host_ ? at(piece.slice, from) : at(piece.received.get(), host * mine * element));
    }
    char* const slice = sliceOf(piece);
    combine(c, at(slice, from), std::move(inputs), mine);
    forOtherHosts([&](int host) {
      if (!all && !toRoot && (!rooted || host_ == to)) {
        const size_t theirs = size(piece.count, host) * element;
        piece.step->receive(host, at(slice, first(piece.count, host) * element), theirs);
      }
      if (!all && !toRoot && (!rooted || host == to)) {
        piece.step->send(host, at(slice, from), mine * element);
      }
    });
  };
  const auto end = [&](Piece& piece) {
    if (onRail()) {
      piece.step->finish();
    }
    if (rooted) {
      gatherSlices(c, piece, sliceOf(piece));
    } else {
      spreadSlices(c, piece, resultOf(piece));
    }
    piece = {};
  };
  auto pieces = cut(c);
  for (size_t i = 0; i < pieces.size() + 2; ++i) {
    if (i < pieces.size()) start(pieces[i]);
    if (i >= 1 && i - 1 < pieces.size()) collect(pieces[i - 1]);
    if (i >= 2) end(pieces[i - 2]);
  }
}

// Distributes the slices of all rails among this host's ranks. On entry, the rank on each rail
// holds that rail's slice, at the slice's offset in `result`.
void Execution::spreadSlices(const Collective& c, Piece& piece, char* result) {
  const size_t bytes = piece.count * elementSize(c.type);
  if (t_.rails == localSize()) {
    char* const own = at(result, local() * bytes);
    inside({Kind::allGather, own, result, piece.count, c.type});
  } else {
    for (int rail = 0; rail < t_.rails; ++rail) {
      char* const slice = at(result, rail * bytes);
      inside({Kind::broadcast, slice, slice, piece.count, c.type, rail});
    }
  }
  if (piece.padded) {
    std::memcpy(piece.output, result, piece.outputBytes);
  }
}

// Sends the slices of all rails to the root. `slice`: this rail's slice.
void Execution::gatherSlices(const Collective& c, Piece& piece, char* slice) {
  if (host_ != t_.hostOf[c.root]) {
    return;
  }
  const size_t bytes = piece.count * elementSize(c.type);
  const int root = t_.localOf[c.root];
  std::vector<Message> hops;
  if (t_.rank != c.root) {
    if (onRail()) {
      hops.push_back(hop(true, root, slice, bytes));
    }
    return inside(hops);
  }
  for (int rail = 0; rail < t_.rails; ++rail) {
    if (rail != root) {
      hops.push_back(hop(false, rail, at(piece.result.get(), rail * bytes), bytes));
    }
  }
  inside(hops);
  std::memcpy(piece.output, piece.result.get(), piece.outputBytes);
}

void Execution::reduceScatter(const Collective& c) {
  const size_t bytes = c.count * elementSize(c.type);
  if (bytes == 0) {
    return barrier();
  }
  // Order of the parts in the rails' data: by rail, then by host.
  std::vector<int> order;
  for (int rail = 0; rail < t_.rails; ++rail) {
    for (int host = 0; host < hosts_; ++host) {
      std::ranges::copy(onRail(host, rail), std::back_inserter(order));
    }
  }
  std::vector<int> mine;  // ranks whose parts this rail carries, in the order of its data
  std::vector<size_t> firstOf(hosts_);
  for (int host = 0; onRail() && host < hosts_; ++host) {
    firstOf[host] = mine.size();
    std::ranges::copy(onRail(host, local()), std::back_inserter(mine));
  }
  const auto sums = block(mine.size() * bytes);
  auto part = toInside(c);
  if (t_.even()) {
    Block packed;
    if (!std::ranges::is_sorted(order)) {
      packed = block(order.size() * bytes);
      for (size_t i = 0; i < order.size(); ++i) {
        std::memcpy(at(packed.get(), i * bytes), at(c.input, order[i] * bytes), bytes);
      }
      part.input = packed.get();
    }
    part.count = hosts_ * c.count;
    part.output = sums.get();
    inside(part);
  } else {
    part.kind = Kind::reduce;
    for (const int rank : order) {
      part.root = t_.railOf(rank);
      part.input = at(c.input, rank * bytes);
      const auto found = std::ranges::find(mine, rank);
      part.output = found == mine.end() ? nullptr : at(sums.get(), (found - mine.begin()) * bytes);
      inside(part);
    }
  }
  std::vector<Message> hops;
  Block results;
  if (onRail()) {
    const auto here = onRail(host_, local());
    const size_t ours = here.size() * bytes;
    const auto received = block(hosts_ * ours);
    Step step(*this);
    forOtherHosts([&](int host) {
      const size_t theirs = (host + 1 < hosts_ ? firstOf[host + 1] : mine.size()) - firstOf[host];
      step.receive(host, at(received.get(), host * ours), ours);
      step.send(host, at(sums.get(), firstOf[host] * bytes), theirs * bytes);
    });
    step.finish();
    results = block(ours);
    for (size_t i = 0; i < here.size(); ++i) {
      std::vector<const void*> inputs;
      for (int host = 0; host < hosts_; ++host) {
        inputs.push_back(
            host == host_ ? at(sums.get(), (firstOf[host] + i) * bytes)
                          : at(received.get(), host * ours + i * bytes));
      }
      const bool own = here[i] == t_.rank;
      void* const to = own ? c.output : at(results.get(), i * bytes);
      combine(c, to, std::move(inputs), c.count);
      if (!own) {
        hops.push_back(hop(true, t_.localOf[here[i]], to, bytes));
      }
    }
  } else {
    hops.push_back(hop(false, t_.railOf(t_.rank), c.output, bytes));
  }
  inside(hops);
}

}  // namespace torchcomms_pg::gloo
