#include "shm/Comm.hpp"

#include <chrono>
#include <cstring>
#include <thread>

#include "shm/collective/Algorithms.hpp"

namespace torchcomms_pg::shm {
namespace {

using std::chrono::milliseconds;

// Time limit for threads to leave the user's buffers after a failure. A thread notices the failure
// between two pieces of data, so the limit is ample unless the thread gets no CPU time.
constexpr auto kQuietLimit = milliseconds(1000);

}  // namespace

Comm::Comm(std::shared_ptr<Segment> segment, int rank, bool blocking)
    : segment_(std::move(segment)),
      ranksOnHost_(*segment_, rank),
      rank_(rank),
      blocking_(blocking),
      forkGeneration_(host::forkGeneration()),
      waiter_(*segment_, rank),
      exchange_(*segment_, waiter_, rank),
      pointToPoint_(*this),
      windows_(*this) {}

std::shared_ptr<Comm> Comm::join(const ncclUniqueId& id, int ranks, int rank, bool blocking) {
  std::shared_ptr<Segment> segment = Segment::open(id, ranks);
  RankState& state = segment->state(rank);
  uint32_t claimant = 0;
  const uint32_t pid = processId();
  if (!state.pid.compare_exchange_strong(claimant, pid)) {
    throw NcclError(
        ncclInvalidUsage, "commInitRank: rank " + std::to_string(rank) +
                              " has already joined (pid " + std::to_string(claimant) + ")");
  }
  state.startTime.store(processStartTime(pid), std::memory_order_release);
  std::shared_ptr<Comm> comm(new Comm(segment, rank, blocking));
  state.phase.store(Phase::joined, std::memory_order_release);
  segment->header().joined.fetch_add(1);
  segment->wakeAll(rank);
  return comm;
}

bool Comm::allJoined() const {
  if (ready_.load(std::memory_order_acquire)) return true;
  if (segment_->header().joined.load(std::memory_order_acquire) < size()) return false;
  ranksOnHost_.count();
  ready_.store(true, std::memory_order_release);
  closeCompletedIds();
  return true;
}

void Comm::awaitJoined() {
  waiter_.wait([this] { return allJoined(); }, [](int) { return true; });
}

void Comm::checkProcess() const {
  if (!inOwnProcess()) {
    throw NcclError(
        ncclInvalidUsage,
        "this communicator belongs to the process that this one was forked from; create "
        "communicators after the fork");
  }
}

void Comm::checkUsable() const {
  if (revoked()) throw NcclError(ncclInvalidUsage, "this rank has revoked the communicator");
  if (segment_->failed()) throw segment_->failure();
  if (finalized_.load(std::memory_order_relaxed)) {
    throw NcclError(ncclInvalidUsage, "the communicator is finalized");
  }
  if (!allJoined()) {
    throw NcclError(
        ncclInvalidArgument,
        "the communicator is not ready: commGetAsyncError still reports ncclInProgress");
  }
}

ncclResult_t Comm::asyncError() const {
  if (revoked()) return active_.load() != 0 ? ncclInProgress : ncclSuccess;
  if (segment_->failed()) return segment_->failure().result;
  if (allJoined()) return ncclSuccess;
  // Checks the peers' processes. Otherwise only a waiting thread would notice that a rank has died,
  // and perhaps no thread waits while the caller polls.
  const auto now = std::chrono::steady_clock::now();
  auto due = nextLifeCheck_.load(std::memory_order_relaxed);
  if (now >= due && nextLifeCheck_.compare_exchange_strong(due, now + milliseconds(250))) {
    try {
      waiter_.checkPeers([](int) { return true; });
    } catch (const NcclError& failure) {
      if (allJoined()) return ncclSuccess;
      segment_->fail(failure);
      return segment_->failure().result;
    }
  }
  return ncclInProgress;
}

std::string Comm::whoAmI() const {
  return segment_->nameOf(rank_) + " (pid " + std::to_string(processId()) + ")";
}

Comm::Turn::Turn(Comm& comm, uint64_t ticket) : comm_(comm), ticket_(ticket) {
  try {
    comm.ticketLock_.await(ticket, *comm.segment_);
  } catch (const NcclError& failure) {
    comm.fail(failure);  // this ticket never passes, and later tickets would wait for ever
    throw;
  }
  comm.active_.fetch_add(1);
  comm.exchanging_.store(true, std::memory_order_relaxed);
}

Comm::Turn::~Turn() {
  comm_.active_.fetch_sub(1);
  comm_.exchanging_.store(false, std::memory_order_relaxed);
  comm_.ticketLock_.pass(ticket_);
}

void Comm::run(const Collective& collective) {
  const Turn turn(*this, ticketLock_.take());
  execute(exchange_, collective, rank_, size());
}

bool Comm::begin(uint64_t ticket, const Collective& collective) noexcept {
  if (!ticketLock_.isNext(ticket) || segment_->failed()) return false;
  bool begun = false;
  try {
    const Active active(*this);
    begun = shm::begin(exchange_, collective, rank_, size());
  } catch (const std::exception&) {
    // The communicator has failed; the thread that executes the collective raises the failure.
  }
  begun_.store(begun, std::memory_order_relaxed);
  return begun;
}

void Comm::complete(const Collective& collective) {
  begun_.store(false, std::memory_order_relaxed);
  shm::complete(exchange_, collective, rank_, size());
}

void Comm::planEnded() {
  if (pending_.fetch_sub(1) != 1) return;
  LockGuard lock(mutex_);
  planEnded_.notify_all();
}

void Comm::awaitPlans() {
  {
    UniqueLock lock(mutex_);
    while (pending_.load() != 0 && !segment_->failed()) {
      planEnded_.wait_for(lock, std::chrono::milliseconds(50));
    }
  }
  // After a failure, a stream may never reach a plan. Such a plan no longer touches buffers; only a
  // plan that is being executed may.
  if (segment_->failed()) awaitQuiet();
}

std::vector<int> Comm::missingRanks() {
  if (segment_->failed()) return segment_->failure().ranks;
  if (!allJoined()) {
    return segment_->ranksWhere([this](int rank) {
      return segment_->state(rank).phase.load(std::memory_order_acquire) == Phase::absent;
    });
  }
  std::vector<int> absent;
  if (exchanging_.load(std::memory_order_relaxed)) absent = exchange_.missingRanks();
  if (absent.empty()) absent = windows_.missingRanks();
  return absent.empty() ? pointToPoint_.missingRanks() : absent;
}

void Comm::finalize() {
  if (revoked()) throw NcclError(ncclInvalidArgument, "commFinalize: the communicator is revoked");
  if (finalized_.exchange(true)) {
    throw NcclError(ncclInvalidArgument, "commFinalize: the communicator is already finalized");
  }
  awaitPlans();
  if (!segment_->failed() && allJoined()) exchange_.checkLastSteps();
  if (segment_->failed()) throw segment_->failure();
}

void Comm::leave(Phase phase) {
  segment_->state(rank_).phase.store(phase, std::memory_order_release);
  segment_->wakeAll(rank_);
}

void Comm::destroy() {
  finalized_.store(true);
  awaitPlans();
  if (!segment_->failed() && allJoined()) {
    try {
      exchange_.checkLastSteps();
    } catch (const NcclError&) {
      // The segment records the failure for the peers. This rank has no operation left that could
      // raise it.
    }
  }
  pointToPoint_.shutdown("the communicator was destroyed");
  leave(Phase::departed);
  closeCompletedIds();
}

void Comm::awaitQuiet() {
  const auto end = std::chrono::steady_clock::now() + kQuietLimit;
  while (active_.load() != 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void Comm::abort() {
  const std::string text = whoAmI() + " aborted the communicator";
  fail(NcclError(ncclRemoteError, text, {rank_}));
  pointToPoint_.shutdown(text);
  leave(Phase::aborted);
  awaitQuiet();
  closeCompletedIds();
}

void Comm::revoke() {
  if (finalized_.load()) {
    throw NcclError(ncclInvalidArgument, "commRevoke: the communicator is finalized");
  }
  if (revoked_.exchange(true)) {
    throw NcclError(ncclInvalidArgument, "commRevoke: the communicator is already revoked");
  }
  const std::string text = whoAmI() + " revoked the communicator";
  fail(NcclError(ncclRemoteError, text, {rank_}));
  pointToPoint_.shutdown(text);
  awaitQuiet();
}

void* Comm::registerBuffer() {
  LockGuard lock(mutex_);
  const uintptr_t handle = nextRegistration_++;
  registrations_.insert(handle);
  return reinterpret_cast<void*>(handle);
}

void Comm::deregisterBuffer(void* handle) {
  LockGuard lock(mutex_);
  if (registrations_.erase(reinterpret_cast<uintptr_t>(handle)) == 0) {
    throw NcclError(
        ncclInvalidArgument,
        "commDeregister: handle was not returned by commRegister of this communicator, or "
        "is already deregistered");
  }
}

void Comm::offerShrink(uint64_t excluded, const ncclUniqueId& id) {
  ShrinkOffer& offer = segment_->state(rank_).offer;
  uint64_t words[ShrinkOffer::kWords];
  std::memcpy(words, &id, sizeof words);
  offer.generation.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  offer.excluded.store(excluded, std::memory_order_relaxed);
  for (size_t i = 0; i < ShrinkOffer::kWords; ++i) {
    offer.id[i].store(words[i], std::memory_order_relaxed);
  }
  offer.generation.fetch_add(1, std::memory_order_release);
  segment_->wakeAll(rank_);
}

std::optional<ncclUniqueId> Comm::takeShrinkOffer(
    int leader, uint64_t excluded, std::chrono::steady_clock::time_point deadline) {
  uint32_t taken;
  {
    LockGuard lock(mutex_);
    taken = takenOffers_[leader];
  }
  const ShrinkOffer& offer = segment_->state(leader).offer;
  uint64_t words[ShrinkOffer::kWords];
  uint32_t generation = 0;
  bool offered = false;
  const auto look = [&] {
    generation = offer.generation.load(std::memory_order_acquire);
    if (generation % 2 != 0 || generation == taken) return false;
    const bool wanted = offer.excluded.load(std::memory_order_relaxed) == excluded;
    for (size_t i = 0; i < ShrinkOffer::kWords; ++i) {
      words[i] = offer.id[i].load(std::memory_order_relaxed);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return wanted && offer.generation.load(std::memory_order_relaxed) == generation;
  };
  waiter_.waitDespiteFailure(
      [&] {
        offered = look();
        return offered || std::chrono::steady_clock::now() >= deadline;
      },
      [leader](int rank) { return rank == leader; });
  if (!offered) return std::nullopt;
  LockGuard lock(mutex_);
  takenOffers_[leader] = generation;
  ncclUniqueId id;
  std::memcpy(&id, words, sizeof id);
  return id;
}

}  // namespace torchcomms_pg::shm
