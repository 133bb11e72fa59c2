#include "shm/collective/Algorithms.hpp"

#include <algorithm>
#include <utility>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {
namespace {

// A range of elements.
struct Range {
  size_t first;
  size_t count;
};

class Execution {
 public:
  Execution(Exchange& exchange, const Collective& c, int rank, int ranks)
      : exchange_(exchange),
        c_(c),
        rank_(rank),
        ranks_(ranks),
        elementBytes_(elementSize(c.type)),
        partCapacity_(exchange.bytes() / ranks / kLine * kLine / elementBytes_),
        pieceCapacity_(std::min(exchange.bytes(), kPieceBytes) / elementBytes_),
        scalar_(c.op.scalarAddress != nullptr ? c.op.scalarAddress : c.op.scalar.data()) {}

  void run();

  // publish() and complete() are the two halves of run() for a collective of one step. oneStep()
  // returns whether the collective takes one step and publish() stages only little data.
  bool oneStep() const {
    const size_t staged = bytes(c_.count) * (inParts() ? ranks_ : 1);
    return !shared() && c_.count <= capacity() && staged <= kPublishedBytes;
  }
  void publish() {
    if (ranks_ == 1) return;
    exchange_.begin(signatureOf(c_), hasRoot(c_.kind));
    prepare({0, c_.count});
  }
  void complete() { ranks_ == 1 ? alone() : process({0, c_.count}); }

 private:
  // Limit of the bytes that a rank stages in one step of all_gather or gather. Measured: half the
  // size takes up to 1.4 times as long with two ranks, twice the size up to 1.2 times with four.
  static constexpr size_t kPieceBytes = 512 << 10;

  // Limit of the bytes that publish() stages, since the copy delays the caller.
  static constexpr size_t kPublishedBytes = 256 << 10;

  void alone() { stage(c_.output, c_.input, c_.count); }
  void reduceShared();

  // Returns whether the ranks share the work of reducing.
  bool shared() const {
    const bool reduces = c_.kind == CollectiveKind::allReduce || c_.kind == CollectiveKind::reduce;
    return reduces && bytes(c_.count) > oneShotBytes(ranks_);
  }
  // Returns how many of c_.count elements one step handles. Not for operations that are shared().
  size_t capacity() const;
  // Returns whether a rank stages a separate part for each other rank.
  bool inParts() const;
  // prepare() publishes this rank's data for a step. process() reads the other ranks' data and
  // completes the output.
  void prepare(Range range);
  void process(Range range);
  void fill(std::byte* mine, Range range) const;

  size_t bytes(size_t elements) const { return elements * elementBytes_; }
  const std::byte* input(size_t element) const {
    return static_cast<const std::byte*>(c_.input) + bytes(element);
  }
  std::byte* output(size_t element) const {
    return static_cast<std::byte*>(c_.output) + bytes(element);
  }
  std::byte* part(std::byte* buffer, int owner) const {
    return buffer + bytes(partCapacity_) * owner;
  }
  const std::byte* part(const std::byte* buffer, int owner) const {
    return buffer + bytes(partCapacity_) * owner;
  }

  void move(void* out, const void* in, size_t count) const { host::copy(out, in, bytes(count)); }
  // Copies a part of this rank's input, multiplied by the operator's factor if it has one.
  void stage(void* out, const void* in, size_t count) const {
    if (c_.op.scaled) {
      host::scale(c_.type, out, in, scalar_, count);
    } else {
      host::copy(out, in, bytes(count));
    }
  }
  void combine(void* out, const void* const* in, size_t count) const {
    host::reduce(c_.type, c_.op.scaled ? ncclSum : c_.op.reduction, out, in, ranks_, count);
  }
  // Returns the rank that is `i` + 1 after this one, modulo ranks_: every rank begins with another
  // peer, and `i` = ranks_ - 1 returns this rank itself.
  int peer(int i) const { return (rank_ + 1 + i) % ranks_; }

  bool root() const { return rank_ == c_.root; }
  bool wantsResult() const { return c_.kind != CollectiveKind::reduce || root(); }

  Exchange& exchange_;
  const Collective& c_;
  const int rank_;
  const int ranks_;
  const size_t elementBytes_;
  const size_t partCapacity_;
  const size_t pieceCapacity_;
  const void* scalar_;
};

void Execution::run() {
  if (ranks_ == 1) return alone();
  exchange_.begin(signatureOf(c_), hasRoot(c_.kind));
  if (shared()) return reduceShared();
  Range next{0, std::min(capacity(), c_.count)};
  prepare(next);
  do {
    const Range now = next;
    next.first += now.count;
    next.count = std::min(capacity(), c_.count - next.first);
    if (next.count != 0) prepare(next);  // publishes one range ahead of process()
    process(now);
  } while (next.count != 0);
}

// Runs a reduce-scatter and then an all-gather (Rabenseifner), in rounds of two steps. In the first
// step, every rank reduces its part of all inputs. In the second, the ranks that want the result
// collect the reduced parts.
void Execution::reduceShared() {
  struct Round {
    Range all;
    size_t part;
    Range of(int owner) const {
      const size_t from = std::min(all.count, part * owner);
      return {all.first + from, std::min(part, all.count - from)};
    }
  };
  const size_t lineElements = kLine / elementBytes_;
  const auto roundAt = [&](size_t first) {
    const size_t count = std::min(c_.count - first, partCapacity_ * ranks_);
    const size_t even = (count + ranks_ - 1) / ranks_;
    return Round{{first, count}, (even + lineElements - 1) / lineElements * lineElements};
  };
  std::byte* staged = nullptr;
  const auto stageRound = [&](const Round& round) {
    staged = exchange_.open();
    for (int i = 0; i < ranks_ - 1 + c_.op.scaled; ++i) {
      const Range range = round.of(peer(i));
      stage(part(staged, peer(i)), input(range.first), range.count);
    }
    exchange_.publish();
  };

  Round next = roundAt(0);
  stageRound(next);
  while (next.all.count != 0) {
    const Round round = next;
    const Range own = round.of(rank_);
    const void* in[kMaxRanks];
    for (int r = 0; r < ranks_; ++r) {
      in[r] = r != rank_     ? part(exchange_.read(r), rank_)
              : c_.op.scaled ? part(staged, rank_)
                             : input(own.first);
    }
    std::byte* const reduced = exchange_.open();
    combine(reduced, in, own.count);
    exchange_.close();
    exchange_.publish();

    if (wantsResult()) host::copy(output(own.first), reduced, bytes(own.count));
    next = roundAt(round.all.first + round.all.count);
    if (next.all.count != 0) stageRound(next);
    if (wantsResult()) {
      for (int i = 0; i < ranks_ - 1; ++i) {
        const Range range = round.of(peer(i));
        host::copy(output(range.first), exchange_.read(peer(i)), bytes(range.count));
      }
    }
    exchange_.close();
  }
}

size_t Execution::capacity() const {
  switch (c_.kind) {
    case CollectiveKind::allReduce:
    case CollectiveKind::reduce: return c_.count;
    case CollectiveKind::broadcast: return exchange_.bytes() / elementBytes_;
    default: return inParts() ? partCapacity_ : pieceCapacity_;
  }
}

bool Execution::inParts() const {
  switch (c_.kind) {
    case CollectiveKind::reduceScatter:
    case CollectiveKind::allToAll:
    case CollectiveKind::scatter: return true;
    default: return false;
  }
}

void Execution::prepare(Range range) {
  fill(exchange_.open(), range);
  exchange_.publish();
  // Copies the part of the output that comes from this rank's own input.
  const size_t own = c_.count * rank_ + range.first;
  switch (c_.kind) {
    case CollectiveKind::allGather: return move(output(own), input(range.first), range.count);
    case CollectiveKind::allToAll: return move(output(own), input(own), range.count);
    case CollectiveKind::broadcast:
      if (root()) move(output(range.first), input(range.first), range.count);
      return;
    case CollectiveKind::gather:
      if (root()) move(output(own), input(range.first), range.count);
      return;
    case CollectiveKind::scatter:
      if (root()) move(output(range.first), input(own), range.count);
      return;
    default: return;
  }
}

void Execution::fill(std::byte* mine, Range range) const {
  if (range.count == 0) return;  // as in a barrier
  const auto inputOf = [&](int rank) { return input(c_.count * rank + range.first); };
  switch (c_.kind) {
    case CollectiveKind::reduce:
      // No other rank reads the root's input.
      if (root() && !c_.op.scaled) return;
      [[fallthrough]];
    case CollectiveKind::allReduce: return stage(mine, input(range.first), range.count);
    case CollectiveKind::reduceScatter:
      for (int i = 0; i < ranks_ - 1 + c_.op.scaled; ++i) {
        stage(part(mine, peer(i)), inputOf(peer(i)), range.count);
      }
      return;
    case CollectiveKind::allGather: return host::copy(mine, input(range.first), bytes(range.count));
    case CollectiveKind::broadcast:
      if (root()) host::copy(mine, input(range.first), bytes(range.count));
      return;
    case CollectiveKind::gather:
      if (!root()) host::copy(mine, input(range.first), bytes(range.count));
      return;
    case CollectiveKind::scatter:
      if (!root()) return;
      [[fallthrough]];
    case CollectiveKind::allToAll:
      for (int i = 0; i < ranks_ - 1; ++i) {
        host::copy(part(mine, peer(i)), inputOf(peer(i)), bytes(range.count));
      }
      return;
    case CollectiveKind::split:
    case CollectiveKind::window:
    case CollectiveKind::barrier: break;
  }
  throw NcclError(ncclInternalError, "not a collective that moves data");
}

void Execution::process(Range range) {
  const auto collect = [&](auto&& find) {
    for (int i = 0; i < ranks_ - 1; ++i) {
      std::byte* const out = output(c_.count * peer(i) + range.first);
      host::copy(out, find(exchange_.read(peer(i))), bytes(range.count));
    }
  };
  // Reads this rank's own input in place, unless it had to be scaled.
  const auto combineParts = [&](const void* own, auto&& find) {
    const void* in[kMaxRanks];
    for (int r = 0; r < ranks_; ++r) {
      const bool staged = r != rank_ || c_.op.scaled;
      in[r] = staged ? find(r != rank_ ? exchange_.read(r) : exchange_.mine()) : own;
    }
    combine(output(range.first), in, range.count);
  };
  const auto whole = [](const std::byte* buffer) { return buffer; };
  const auto ofThisRank = [&](const std::byte* buffer) { return part(buffer, rank_); };
  const auto copyFromRoot = [&](auto&& find) {
    host::copy(output(range.first), find(exchange_.read(c_.root)), bytes(range.count));
  };
  if (range.count == 0) {
    // Moves nothing, but detects a peer that calls another collective.
    for (int i = 0; i < ranks_ - 1; ++i) exchange_.read(peer(i));
    return exchange_.close();
  }
  switch (c_.kind) {
    case CollectiveKind::allReduce:
    case CollectiveKind::reduce:
      if (wantsResult()) combineParts(input(range.first), whole);
      break;
    case CollectiveKind::reduceScatter:
      combineParts(input(c_.count * rank_ + range.first), ofThisRank);
      break;
    case CollectiveKind::allGather: collect(whole); break;
    case CollectiveKind::allToAll: collect(ofThisRank); break;
    case CollectiveKind::gather:
      if (root()) collect(whole);
      break;
    case CollectiveKind::broadcast:
      if (!root()) copyFromRoot(whole);
      break;
    case CollectiveKind::scatter:
      if (!root()) copyFromRoot(ofThisRank);
      break;
    default: break;
  }
  exchange_.close();
}

}  // namespace

size_t oneShotBytes(int ranks) {
  // Measured: one step costs less up to 64 KiB with two ranks, 16 KiB with four.
  constexpr size_t kScale = 256 << 10;
  return kScale / (static_cast<size_t>(ranks) * ranks);
}

void execute(Exchange& exchange, const Collective& collective, int rank, int ranks) {
  Execution(exchange, collective, rank, ranks).run();
}

bool begin(Exchange& exchange, const Collective& collective, int rank, int ranks) {
  Execution execution(exchange, collective, rank, ranks);
  if (!execution.oneStep() || !exchange.hasRoom()) return false;
  execution.publish();
  return true;
}

void complete(Exchange& exchange, const Collective& collective, int rank, int ranks) {
  Execution(exchange, collective, rank, ranks).complete();
}

}  // namespace torchcomms_pg::shm
