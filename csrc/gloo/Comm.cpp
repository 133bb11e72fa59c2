#include "gloo/Comm.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "shm/Interrupt.hpp"
#include "shm/Reduce.hpp"

namespace torchcomms_pg::gloo {

namespace {

using shm::Collective;
using shm::CollectiveKind;

// Up to so many bytes in all, every rank gets all inputs and reduces them: one step instead of two.
constexpr size_t kSmall = 64 << 10;

// How often a thread that has handlers to run looks for signals.
constexpr std::chrono::milliseconds kSignalLook{200};

char* at(void* base, size_t offset) {
  return static_cast<char*>(base) + offset;
}

const char* at(const void* base, size_t offset) {
  return static_cast<const char*>(base) + offset;
}

shm::Signature signatureOf(const Message& message) {
  return {
      .kind = 0,
      .types = static_cast<uint8_t>(message.type),
      .root = 0,
      .countLow = static_cast<uint32_t>(message.count),
      .countHigh = static_cast<uint32_t>(message.count >> 32)};
}

}  // namespace

class Comm::Step {
 public:
  Step(Link& link, const Collective& collective, int tag)
      : link_(link), signature_(shm::signatureOf(collective)), tag_(tag) {}

  void send(int peer, const void* data, size_t bytes) {
    add(true, peer, const_cast<void*>(data), bytes);
  }
  void receive(int peer, void* data, size_t bytes) { add(false, peer, data, bytes); }

  void finish() {
    for (const auto& parcel : parcels_) {
      link_.complete(*parcel, /*late=*/true);
    }
  }

 private:
  void add(bool sending, int peer, void* data, size_t bytes) {
    parcels_.push_back(link_.post({signature_, sending, peer, tag_, data, bytes, {}, {}}));
  }

  Link& link_;
  const shm::Signature signature_;
  const int tag_;
  std::vector<std::shared_ptr<Parcel>> parcels_;
};

Comm::Comm(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    Connect connect,
    Connected connected)
    : store_(store),
      connect_(std::move(connect)),
      link_(std::make_shared<Link>(connect_, store, rank, size)) {
  if (size > 1 && connected == Connected::now) {
    link_->connect();
  }
}

void Comm::run(const Collective& c, int tag) {
  const int rank = link_->rank(), size = link_->size();
  const size_t bytes = c.count * elementSize(c.type);
  const bool isRoot = rank == c.root;
  std::vector<char> scaled;
  const void* input = c.input;
  if (c.op.scaled) {
    const size_t parts = c.kind == CollectiveKind::reduceScatter ? size : 1;
    const void* factor = c.op.scalarAddress == nullptr ? c.op.scalar.data() : c.op.scalarAddress;
    scaled.resize(parts * bytes);
    shm::scale(c.type, scaled.data(), input, factor, parts * c.count);
    input = scaled.data();
  }
  Step step(*link_, c, tag);
  switch (c.kind) {
    case CollectiveKind::allReduce: allReduce(c, input, tag); return;
    case CollectiveKind::reduceScatter:
    case CollectiveKind::reduce: {
      // Every part goes to the rank that reduces it; a reduction to a root has one part.
      const bool scatter = c.kind == CollectiveKind::reduceScatter;
      const bool reduces = scatter || isRoot;
      std::vector<char> received(reduces ? size * bytes : 0);
      std::vector<const void*> parts;
      for (int peer = 0; peer < size; ++peer) {
        const void* const mine = at(input, scatter ? peer * bytes : 0);
        if (peer == rank) {
          parts.push_back(mine);
          continue;
        }
        if (reduces) {
          parts.push_back(at(received.data(), peer * bytes));
          step.receive(peer, at(received.data(), peer * bytes), bytes);
        }
        if (scatter || peer == c.root) {
          step.send(peer, mine, bytes);
        }
      }
      step.finish();
      if (reduces) {
        reduceTo(c, c.output, std::move(parts), c.count);
      }
      return;
    }
    case CollectiveKind::allGather:
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) {
          step.receive(peer, at(c.output, peer * bytes), bytes);
          step.send(peer, input, bytes);
        }
      }
      step.finish();
      shm::copy(at(c.output, rank * bytes), input, bytes);
      return;
    case CollectiveKind::broadcast:
      for (int peer = 0; isRoot && peer < size; ++peer) {
        if (peer != rank) {
          step.send(peer, input, bytes);
        }
      }
      if (!isRoot) {
        step.receive(c.root, c.output, bytes);
      }
      step.finish();
      if (isRoot) {
        shm::copy(c.output, input, bytes);
      }
      return;
    case CollectiveKind::allToAll:
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) {
          step.receive(peer, at(c.output, peer * bytes), bytes);
          step.send(peer, at(input, peer * bytes), bytes);
        }
      }
      step.finish();
      shm::copy(at(c.output, rank * bytes), at(input, rank * bytes), bytes);
      return;
    case CollectiveKind::gather:
      for (int peer = 0; isRoot && peer < size; ++peer) {
        if (peer != rank) {
          step.receive(peer, at(c.output, peer * bytes), bytes);
        }
      }
      if (!isRoot) {
        step.send(c.root, input, bytes);
      }
      step.finish();
      if (isRoot) {
        shm::copy(at(c.output, rank * bytes), input, bytes);
      }
      return;
    case CollectiveKind::scatter:
      for (int peer = 0; isRoot && peer < size; ++peer) {
        if (peer != rank) {
          step.send(peer, at(input, peer * bytes), bytes);
        }
      }
      if (!isRoot) {
        step.receive(c.root, c.output, bytes);
      }
      step.finish();
      if (isRoot) {
        shm::copy(c.output, at(input, rank * bytes), bytes);
      }
      return;
    case CollectiveKind::barrier:
      for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) {
          step.receive(peer, nullptr, 0);
          step.send(peer, nullptr, 0);
        }
      }
      step.finish();
      return;
    case CollectiveKind::split:  // see split()
    case CollectiveKind::window: return;
  }
}

void Comm::allReduce(const Collective& c, const void* input, int tag) {
  const int rank = link_->rank(), size = link_->size();
  const size_t element = elementSize(c.type);
  const bool small = size * c.count * element <= kSmall;
  // Rank r reduces elements begin(r) to begin(r + 1); of little data every rank reduces all.
  const auto begin = [&](int r) { return small ? 0 : c.count * r / size; };
  const size_t mine = small ? c.count : begin(rank + 1) - begin(rank);
  std::vector<char> received(size * mine * element);
  std::vector<const void*> parts;
  Step first(*link_, c, tag);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) {
      parts.push_back(at(input, begin(rank) * element));
      continue;
    }
    parts.push_back(at(received.data(), peer * mine * element));
    first.receive(peer, at(received.data(), peer * mine * element), mine * element);
    const size_t theirs = small ? c.count : begin(peer + 1) - begin(peer);
    first.send(peer, at(input, begin(peer) * element), theirs * element);
  }
  first.finish();
  void* const part = at(c.output, begin(rank) * element);
  reduceTo(c, part, std::move(parts), mine);
  if (small) {
    return;
  }
  Step second(*link_, c, tag);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      const size_t theirs = (begin(peer + 1) - begin(peer)) * element;
      second.receive(peer, at(c.output, begin(peer) * element), theirs);
      second.send(peer, part, mine * element);
    }
  }
  second.finish();
}

void Comm::reduceTo(
    const Collective& c, void* output, std::vector<const void*> inputs, size_t count) {
  // ncclRedOp_t and Reduction list the same operations in the same order.
  const auto reduction =
      c.op.scaled ? shm::Reduction::sum : static_cast<shm::Reduction>(c.op.reduction);
  shm::reduce(c.type, reduction, output, inputs.data(), static_cast<int>(inputs.size()), count);
}

std::shared_ptr<Parcel> Comm::post(bool sending, const Message& message, int tag) {
  return link_->post(
      {signatureOf(message),
       sending,
       message.peer,
       tag,
       message.buffer,
       message.count * elementSize(message.type),
       {},
       {}});
}

void Comm::prepareLater() {
  waiters_.start();
  if (!link_->connected()) {
    runWatched([this] { link_->awaitConnections(); });
  }
}

void Comm::runWatched(const std::function<void()>& body) {
  if (!shm::runsHandlers()) {
    body();
    return;
  }
  struct {
    std::mutex mutex;
    std::condition_variable ended;
    bool done = false;
    std::exception_ptr error;
  } run;
  try {
    watched_.enqueue([&] {
      std::exception_ptr error;
      try {
        body();
      } catch (...) {
        error = std::current_exception();
      }
      std::lock_guard lock(run.mutex);  // to the end: `run` goes when the caller sees `done`
      run.error = std::move(error);
      run.done = true;
      run.ended.notify_all();
    });
  } catch (const std::runtime_error&) {
    body();  // no thread can be started
    return;
  }
  std::unique_lock lock(run.mutex);
  while (!run.ended.wait_for(lock, kSignalLook, [&] { return run.done; })) {
    lock.unlock();
    if (shm::interrupted()) {
      const auto failure = shm::interruption(link_->rank());
      link_->fail(failure.result, failure.what(), failure.ranks);
    }
    lock.lock();
  }
  if (run.error) {
    std::rethrow_exception(run.error);
  }
}

void Comm::completeLater(std::shared_ptr<Parcel> parcel, const Message& message) {
  waiters_.enqueue([self = shared_from_this(),
                    parcel = std::move(parcel),
                    done = message.done,
                    context = message.context] {
    self->waiters_.handOver();  // other messages do not wait for this one
    ncclResult_t result = ncclSuccess;
    int peer = parcel->peer;
    try {
      peer = self->link_->complete(*parcel, /*late=*/false);
    } catch (const shm::Failure& failure) {
      result = failure.result;
    } catch (const std::exception& error) {
      self->link_->fail(ncclInternalError, error.what(), {});
      result = ncclInternalError;
    }
    done(context, result, peer);
  });
}

std::shared_ptr<Comm> Comm::split(int color, int key, int tag) {
  struct Choice {
    int color;
    int key;
    int rank;
  };
  const int rank = link_->rank(), size = link_->size();
  std::vector<Choice> choices(size);
  const Choice mine{color, key, rank};
  Collective c{CollectiveKind::split, &mine, choices.data(), sizeof(Choice), ncclInt8, {}, 0};
  Step step(*link_, c, tag);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      step.receive(peer, &choices[peer], sizeof(Choice));
      step.send(peer, &mine, sizeof(Choice));
    }
  }
  step.finish();
  choices[rank] = mine;
  if (color == NCCL_SPLIT_NOCOLOR) {
    return nullptr;
  }
  std::erase_if(choices, [color](const Choice& choice) { return choice.color != color; });
  std::ranges::stable_sort(choices, {}, &Choice::key);
  const auto position = std::ranges::find(choices, rank, &Choice::rank) - choices.begin();
  const auto meeting = c10::make_intrusive<c10d::PrefixStore>(
      "split/" + std::to_string(tag) + "/" + std::to_string(color), store_);
  return std::make_shared<Comm>(
      meeting,
      static_cast<int>(position),
      static_cast<int>(choices.size()),
      connect_,
      Connected::now);
}

ncclRedOp_t Comm::createOperator(const shm::Operator& op) {
  std::lock_guard lock(mutex_);
  operators_[++lastOperator_] = op;
  return static_cast<ncclRedOp_t>(lastOperator_);
}

void Comm::destroyOperator(ncclRedOp_t op) {
  std::lock_guard lock(mutex_);
  operators_.erase(op);
}

shm::Operator Comm::resolveOperator(ncclRedOp_t op) const {
  if (op < ncclNumOps) {
    return {.reduction = op};
  }
  std::lock_guard lock(mutex_);
  return operators_.at(op);
}

}  // namespace torchcomms_pg::gloo
