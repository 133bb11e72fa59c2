#include "shm/Algorithms.hpp"

#include <algorithm>
#include <utility>

#include "shm/Reduce.hpp"

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

 private:
  // What one rank stages at once where peers only copy: smaller than a staging
  // buffer, so that copying in and copying out overlap.
  static constexpr size_t kPieceBytes = 256 << 10;

  void alone();
  void empty();
  void reduceOneShot(bool wanted);
  void reduceShared(bool toAll);
  void reduceScatter();
  void allGather();
  void broadcast();
  void allToAll();
  void gather();
  void scatter();

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

  void move(void* out, const void* in, size_t count) const {
    if (out != in) shm::copy(out, in, bytes(count));
  }
  // Copies this rank's input to where it is reduced from.
  void stage(void* out, const void* in, size_t count) const {
    if (c_.op.scaled) {
      scale(c_.type, out, in, scalar_, count);
    } else {
      shm::copy(out, in, bytes(count));
    }
  }
  void combine(void* out, const void* const* in, size_t count) const {
    const auto reduction = c_.op.scaled ? Reduction::sum : static_cast<Reduction>(c_.op.reduction);
    reduce(c_.type, reduction, out, in, ranks_, count);
  }
  // The peer to deal with in turn `i` of ranks_ - 1; every rank starts with
  // another one.
  int peer(int i) const { return (rank_ + 1 + i) % ranks_; }

  // Calls process(Range) for consecutive ranges of up to `capacity` elements of
  // c_.count; calls prepare(Range) for each, one range ahead.
  template <class Prepare, class Process>
  void pipeline(size_t capacity, const Prepare& prepare, const Process& process) const {
    Range next{0, std::min(capacity, c_.count)};
    prepare(next);
    while (next.count != 0) {
      const Range now = next;
      next.first += now.count;
      next.count = std::min(capacity, c_.count - next.first);
      if (next.count != 0) prepare(next);
      process(now);
    }
  }

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
  if (c_.count == 0) return empty();
  const bool small = bytes(c_.count) <= oneShotBytes(ranks_);
  switch (c_.kind) {
    case CollectiveKind::allReduce: return small ? reduceOneShot(true) : reduceShared(true);
    case CollectiveKind::reduce:
      return small ? reduceOneShot(rank_ == c_.root) : reduceShared(false);
    case CollectiveKind::reduceScatter: return reduceScatter();
    case CollectiveKind::allGather: return allGather();
    case CollectiveKind::broadcast: return broadcast();
    case CollectiveKind::allToAll: return allToAll();
    case CollectiveKind::gather: return gather();
    case CollectiveKind::scatter: return scatter();
    case CollectiveKind::split:
    case CollectiveKind::window:
    case CollectiveKind::barrier: break;
  }
  throw Failure(ncclInternalError, "not a collective that moves data");
}

void Execution::alone() {
  if (c_.count == 0) return;
  if (c_.op.scaled) {
    stage(c_.output, c_.input, c_.count);
  } else {
    move(c_.output, c_.input, c_.count);
  }
}

// Moves nothing, but notices when a peer calls something else.
void Execution::empty() {
  exchange_.open();
  exchange_.publish();
  for (int i = 0; i < ranks_ - 1; ++i) exchange_.read(peer(i));
  exchange_.close();
}

void Execution::reduceOneShot(bool wanted) {
  std::byte* const mine = exchange_.open();
  // A root's input is read by nobody else.
  if (c_.op.scaled || c_.kind == CollectiveKind::allReduce || !wanted) {
    stage(mine, c_.input, c_.count);
  }
  exchange_.publish();
  if (wanted) {
    const void* in[kMaxRanks];
    for (int r = 0; r < ranks_; ++r) {
      in[r] = r != rank_ ? exchange_.read(r) : c_.op.scaled ? mine : c_.input;
    }
    combine(c_.output, in, c_.count);
  }
  exchange_.close();
}

// Rounds of two steps: in the first, every rank gets its part of everybody's
// input and reduces it; in the second, the reduced parts are collected.
void Execution::reduceShared(bool toAll) {
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

    const bool wanted = toAll || rank_ == c_.root;
    if (wanted) shm::copy(output(own.first), reduced, bytes(own.count));
    next = roundAt(round.all.first + round.all.count);
    if (next.all.count != 0) stageRound(next);
    if (wanted) {
      for (int i = 0; i < ranks_ - 1; ++i) {
        const Range range = round.of(peer(i));
        shm::copy(output(range.first), exchange_.read(peer(i)), bytes(range.count));
      }
    }
    exchange_.close();
  }
}

void Execution::reduceScatter() {
  std::byte* staged[2] = {nullptr, nullptr};  // of this range and the one ahead
  const auto prepare = [&](Range range) {
    staged[0] = std::exchange(staged[1], exchange_.open());
    for (int i = 0; i < ranks_ - 1 + c_.op.scaled; ++i) {
      stage(part(staged[1], peer(i)), input(c_.count * peer(i) + range.first), range.count);
    }
    exchange_.publish();
  };
  const auto process = [&](Range range) {
    const bool last = range.first + range.count == c_.count;
    const void* in[kMaxRanks];
    for (int r = 0; r < ranks_; ++r) {
      in[r] = r != rank_     ? part(exchange_.read(r), rank_)
              : c_.op.scaled ? part(staged[last ? 1 : 0], rank_)
                             : input(c_.count * rank_ + range.first);
    }
    combine(output(range.first), in, range.count);
    exchange_.close();
  };
  pipeline(partCapacity_, prepare, process);
}

void Execution::allGather() {
  const auto prepare = [&](Range range) {
    shm::copy(exchange_.open(), input(range.first), bytes(range.count));
    exchange_.publish();
    move(output(c_.count * rank_ + range.first), input(range.first), range.count);
  };
  const auto process = [&](Range range) {
    for (int i = 0; i < ranks_ - 1; ++i) {
      shm::copy(
          output(c_.count * peer(i) + range.first), exchange_.read(peer(i)), bytes(range.count));
    }
    exchange_.close();
  };
  pipeline(pieceCapacity_, prepare, process);
}

void Execution::broadcast() {
  const bool root = rank_ == c_.root;
  const auto prepare = [&](Range range) {
    std::byte* const mine = exchange_.open();
    if (root) shm::copy(mine, input(range.first), bytes(range.count));
    exchange_.publish();
    if (root) move(output(range.first), input(range.first), range.count);
  };
  const auto process = [&](Range range) {
    if (!root) shm::copy(output(range.first), exchange_.read(c_.root), bytes(range.count));
    exchange_.close();
  };
  pipeline(pieceCapacity_, prepare, process);
}

void Execution::allToAll() {
  const auto prepare = [&](Range range) {
    std::byte* const mine = exchange_.open();
    for (int i = 0; i < ranks_ - 1; ++i) {
      shm::copy(part(mine, peer(i)), input(c_.count * peer(i) + range.first), bytes(range.count));
    }
    exchange_.publish();
    const size_t own = c_.count * rank_ + range.first;
    move(output(own), input(own), range.count);
  };
  const auto process = [&](Range range) {
    for (int i = 0; i < ranks_ - 1; ++i) {
      shm::copy(
          output(c_.count * peer(i) + range.first),
          part(exchange_.read(peer(i)), rank_),
          bytes(range.count));
    }
    exchange_.close();
  };
  pipeline(partCapacity_, prepare, process);
}

void Execution::gather() {
  const bool root = rank_ == c_.root;
  const auto prepare = [&](Range range) {
    std::byte* const mine = exchange_.open();
    if (!root) shm::copy(mine, input(range.first), bytes(range.count));
    exchange_.publish();
    if (root) move(output(c_.count * rank_ + range.first), input(range.first), range.count);
  };
  const auto process = [&](Range range) {
    for (int i = 0; root && i < ranks_ - 1; ++i) {
      shm::copy(
          output(c_.count * peer(i) + range.first), exchange_.read(peer(i)), bytes(range.count));
    }
    exchange_.close();
  };
  pipeline(pieceCapacity_, prepare, process);
}

void Execution::scatter() {
  const bool root = rank_ == c_.root;
  const auto prepare = [&](Range range) {
    std::byte* const mine = exchange_.open();
    for (int i = 0; root && i < ranks_ - 1; ++i) {
      shm::copy(part(mine, peer(i)), input(c_.count * peer(i) + range.first), bytes(range.count));
    }
    exchange_.publish();
    if (root) move(output(range.first), input(c_.count * rank_ + range.first), range.count);
  };
  const auto process = [&](Range range) {
    if (!root)
      shm::copy(output(range.first), part(exchange_.read(c_.root), rank_), bytes(range.count));
    exchange_.close();
  };
  pipeline(partCapacity_, prepare, process);
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

}  // namespace torchcomms_pg::shm
