#include "shm/collective/Algorithms.hpp"

#include <algorithm>
#include <utility>

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
        shape_(shapeOf(c.kind)),
        rank_(rank),
        ranks_(ranks),
        elementBytes_(elementSize(c.type)),
        partCapacity_(kStagingBytes / ranks / kLine * kLine / elementBytes_),
        pieceCapacity_(std::min(kStagingBytes, kPieceBytes) / elementBytes_),
        scalar_(c.op.scalarAddress != nullptr ? c.op.scalarAddress : c.op.scalar.data()) {}

  void run();

  // publish() and complete() are the two halves of run() for a collective of one step. oneStep()
  // returns whether the collective takes one step and publish() stages only little data.
  bool oneStep() const {
    const size_t staged = bytes(c_.count) * (shape_.inputInParts ? ranks_ : 1);
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
    return shape_.reduces && !shape_.inputInParts && bytes(c_.count) > oneShotBytes(ranks_);
  }
  // Returns how many of c_.count elements one step handles. Not for operations that are shared().
  size_t capacity() const;
  // prepare() publishes this rank's data for a step. process() reads the other ranks' data and
  // completes the output.
  void prepare(Range range);
  void process(Range range);

  size_t bytes(size_t elements) const { return elements * elementBytes_; }
  const std::byte* input(size_t element) const {
    return static_cast<const std::byte*>(c_.input) + bytes(element);
  }
  std::byte* output(size_t element) const {
    return static_cast<std::byte*>(c_.output) + bytes(element);
  }
  // Return where the range begins of the input for `rank`, and of the output from `rank`.
  const std::byte* inputOf(int rank, Range range) const {
    return input(range.first + (shape_.inputInParts ? c_.count * rank : 0));
  }
  std::byte* outputOf(int rank, Range range) const {
    return output(range.first + (shape_.outputInParts ? c_.count * rank : 0));
  }
  template <class Byte>
  Byte* part(Byte* buffer, int owner) const {
    return buffer + bytes(partCapacity_) * owner;
  }

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
  bool wantsResult() const { return !shape_.toRoot || root(); }

  Exchange& exchange_;
  const Collective& c_;
  const Shape shape_;
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
  const auto stageRound = [&](const Round& round) {
    std::byte* const staged = exchange_.open();
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
              : c_.op.scaled ? part(exchange_.mine(), rank_)
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
  if (shape_.inputInParts) return partCapacity_;
  if (shape_.reduces) return c_.count;
  return shape_.fromRoot ? kStagingBytes / elementBytes_ : pieceCapacity_;
}

void Execution::prepare(Range range) {
  std::byte* const mine = exchange_.open();
  const bool gives = !shape_.fromRoot || root();
  // No other rank reads the input of the root that alone gets the output.
  if (gives && !(shape_.toRoot && root() && !c_.op.scaled)) {
    if (shape_.inputInParts) {
      for (int i = 0; i < ranks_ - 1 + c_.op.scaled; ++i) {
        stage(part(mine, peer(i)), inputOf(peer(i), range), range.count);
      }
    } else {
      stage(mine, input(range.first), range.count);
    }
  }
  exchange_.publish();
  // Copies the part of the output that comes from this rank's own input.
  if (!shape_.reduces && gives && wantsResult()) {
    host::copy(outputOf(rank_, range), inputOf(rank_, range), bytes(range.count));
  }
}

void Execution::process(Range range) {
  const auto forThisRank = [this](const std::byte* buffer) {
    return shape_.inputInParts ? part(buffer, rank_) : buffer;
  };
  const auto copyFrom = [&](int rank) {
    host::copy(outputOf(rank, range), forThisRank(exchange_.read(rank)), bytes(range.count));
  };
  if (range.count == 0) {
    // Moves nothing, but detects a peer that calls another collective.
    for (int i = 0; i < ranks_ - 1; ++i) exchange_.read(peer(i));
  } else if (shape_.fromRoot) {
    if (!root()) copyFrom(c_.root);
  } else if (wantsResult() && shape_.reduces) {
    const void* in[kMaxRanks];
    for (int r = 0; r < ranks_; ++r) {
      // Reads this rank's own input in place, unless it had to be scaled.
      in[r] = r != rank_     ? forThisRank(exchange_.read(r))
              : c_.op.scaled ? forThisRank(exchange_.mine())
                             : inputOf(rank_, range);
    }
    combine(output(range.first), in, range.count);
  } else if (wantsResult()) {
    for (int i = 0; i < ranks_ - 1; ++i) copyFrom(peer(i));
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
