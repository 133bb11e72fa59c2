#include "shm/message/PointToPoint.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/Thread.hpp"
#include "nccl/Library.hpp"
#include "shm/Comm.hpp"
#include "shm/Host.hpp"

namespace torchcomms_pg::shm {
namespace {

// Limit of the time for which shutdown() waits for callbacks.
constexpr auto kCallbackLimit = std::chrono::seconds(2);

// Limit of the bytes of a transfer that runIndependently() moves itself. Moving them takes less
// time than waking another thread: 64 KiB are copied in 7 us, and waking takes 35 us.
constexpr size_t kAtOnce = 64 << 10;

// Blocks all signals in threads that are started while the object lives, so that the application's
// threads get them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

// Not analysed: the analysis takes the mutex of the returned lock for one that nobody releases.
UniqueLock PointToPoint::lock() NO_THREAD_SAFETY_ANALYSIS {
  if (!mutex_.try_lock()) {
    contenders_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    contenders_.fetch_sub(1, std::memory_order_relaxed);
  }
  return UniqueLock(mutex_, std::adopt_lock);
}

// Wakes this rank's sleeping threads.
void PointToPoint::ring() const {
  comm_.segment().wakeRank(comm_.rank(), comm_.rank());
}

MessageEngine& PointToPoint::engine() {
  if (!engine_) engine_ = std::make_unique<MessageEngine>(comm_.segment(), comm_.rank());
  return *engine_;
}

void PointToPoint::fail(const std::shared_ptr<const NcclError>& problem) {
  comm_.fail(*problem);
  close(problem);
}

void PointToPoint::add(const std::shared_ptr<Transfer>& transfer) {
  std::shared_ptr<const NcclError> problem;
  {
    const auto guard = lock();
    checkOpen();
    engine().add(transfer);
    problem = engine().problem();
  }
  if (problem) {
    fail(problem);
    throw *problem;
  }
}

// Moves messages and calls `done` for those that end, until satisfied() is true, nothing moves any
// more, or the communicator has failed. Returns whether anything has moved.
template <class Satisfied>
bool PointToPoint::progress(const Satisfied& satisfied) {
  bool any = false;
  for (bool moved = true; moved && !satisfied() && !comm_.segment().failed();) {
    std::shared_ptr<const NcclError> problem;
    bool ended = false;
    {
      const auto guard = lock();
      if (closed_) return any;
      moved = engine().step();
      any |= moved;
      ended = handleEnded();
      problem = engine().problem();
    }
    if (ended) {
      ring();
      callBackAll();
    }
    if (problem) {
      fail(problem);
      return any;
    }
    // Yields while other threads wait for the mutex. A mutex is not fair: without the yield, a
    // waiting thread would wake and find it locked again.
    for (int i = 0; i < 100 && contenders_.load(std::memory_order_relaxed) != 0; ++i) {
      std::this_thread::yield();
    }
  }
  return any;
}

// Lists the ended asynchronous transfers in completed_. Returns whether any transfer has ended.
bool PointToPoint::handleEnded() {
  if (engine().ended().empty()) return false;
  for (auto& transfer : engine().ended()) {
    if (transfer->done == nullptr) continue;
    forget(*transfer);
    completed_.splice(completed_.end(), independent_, transfer->place);
  }
  engine().ended().clear();
  return true;
}

// Returns whether an unfinished transfer cannot end without `rank`.
bool PointToPoint::needs(const Transfer& transfer, int rank) const {
  const int partner = transfer.partner.load(std::memory_order_relaxed);
  if (partner != kAnyPeer) return partner == rank;
  if (transfer.elsewhere) return false;
  // A receive from any rank needs a rank that has left only if all other ranks have left, too.
  const Segment& segment = comm_.segment();
  if (!segment.hasLeft(rank)) return true;
  for (int other = 0; other < comm_.size(); ++other) {
    if (other != comm_.rank() && !segment.hasLeft(other)) return false;
  }
  return true;
}

// Returns involved(): whether some transfer needs `rank`. If the rank has left, moves messages
// first, since the rank may have sent the needed ones before.
template <class Involved>
bool PointToPoint::stillNeeds(int rank, const Involved& involved) {
  if (!involved()) return false;
  if (!comm_.segment().hasLeft(rank)) return true;
  progress([] { return false; });
  return involved();
}

// Moves messages until satisfied() is true or close() has been called. Meanwhile the server moves
// no messages. Throws NcclError.
template <class Satisfied, class Needed>
void PointToPoint::move(const Satisfied& satisfied, const Needed& needed) {
  struct Mover {
    PointToPoint& all;
    explicit Mover(PointToPoint& all) : all(all) {
      const auto guard = all.lock();
      ++all.movers_;
    }
    ~Mover() {
      const auto guard = all.lock();
      --all.movers_;
      if (all.serverMoves()) all.work_.notify_one();
    }
  } const mover(*this);
  // Ends a wait when something has moved, so that the next wait has the whole spin time.
  const auto ready = [&] { return progress(satisfied) || satisfied() || closed_; };
  while (!satisfied() && !closed_) comm_.waiter().wait(ready, needed);
}

void PointToPoint::moveUntil(FunctionRef<bool()> ended) {
  try {
    move(ended, [this](int rank) { return independentNeeds(rank); });
  } catch (const NcclError& failure) {
    // If the communicator has not failed, a signal has interrupted this thread.
    if (comm_.segment().failed()) close(std::make_shared<const NcclError>(failure));
  }
  callBackAll();
}

void PointToPoint::run(Transfers transfers) {
  {
    const auto guard = lock();
    checkOpen();
    for (const auto& transfer : transfers) {
      if (transfer->sending && transfer->peer == comm_.rank() && !transfer->matched) {
        throw NcclError(
            ncclInvalidUsage,
            comm_.segment().nameOf(comm_.rank()) +
                " sends to itself without a receive; post the receive first, or both in "
                "one group");
      }
    }
    for (const auto& transfer : transfers) engine().start(transfer);
  }
  size_t first = 0;  // index of the first transfer that has not ended
  const auto ended = [&] {
    while (first < transfers.size() && transfers[first]->ended.load(std::memory_order_acquire)) {
      ++first;
    }
    return first == transfers.size();
  };
  const auto needed = [&](int rank) {
    return stillNeeds(rank, [&] {
      return std::any_of(transfers.begin() + first, transfers.end(), [&](const auto& transfer) {
        return !transfer->ended.load(std::memory_order_acquire) && needs(*transfer, rank);
      });
    });
  };
  try {
    move(ended, needed);
  } catch (const NcclError& failure) {
    close(std::make_shared<const NcclError>(failure));
    throw;
  }
  if (ended()) return;
  const auto guard = lock();
  checkOpen();
}

void PointToPoint::runIndependently(const std::shared_ptr<Transfer>& transfer) {
  std::shared_ptr<const NcclError> problem;
  {
    const auto guard = lock();
    checkOpen();
    startServer();
    MessageEngine& moving = engine();
    // After the insertion, nothing throws: every failure goes to `done`.
    transfer->place = independent_.insert(independent_.end(), transfer);
    moving.add(transfer);
    if (!moving.problem()) moving.start(transfer);
    problem = moving.problem();
    handleEnded();
  }
  if (problem) return fail(problem);
  callBackAll();
  if (transfer->bytes() <= kAtOnce) {
    progress([&] { return transfer->ended.load(std::memory_order_acquire); });
  }
  {
    const auto guard = lock();
    if (closed_ || transfer->ended.load(std::memory_order_relaxed)) return;
    if (mayWait(*transfer)) return;
    serve(*transfer);
  }
  ring();
}

// Returns whether an unfinished transfer can be left to the thread that will wait for it, since no
// peer waits for the transfer. Counts the bytes that a receive's message may take in the channel.
bool PointToPoint::mayWait(Transfer& transfer) {
  if (!transfer.deferred || transfer.bytes() > kAtOnce) return false;
  if (transfer.sending) return transfer.passed;
  const size_t room = transfer.bytes() + 2 * kLine;  // content, header, and padding to whole lines
  if (transfer.confirmed ||
      room_ + room > comm_.segment().channelBytes() - sizeof(ChannelControl)) {
    return false;
  }
  transfer.room = room;
  room_ += room;
  return true;
}

// Removes a transfer from the counts of mayWait() and serve().
void PointToPoint::forget(Transfer& transfer) {
  served_ -= std::exchange(transfer.served, false);
  room_ -= std::exchange(transfer.room, 0);
}

// Makes the server move the transfer while no other thread moves messages.
void PointToPoint::serve(Transfer& transfer) {
  room_ -= std::exchange(transfer.room, 0);
  if (!std::exchange(transfer.served, true)) ++served_;
  if (serverMoves()) work_.notify_one();
}

void PointToPoint::serveDeferred() {
  const auto guard = lock();
  for (const auto& transfer : independent_) serve(*transfer);
}

bool PointToPoint::cancel(const std::shared_ptr<Transfer>& receive) {
  const auto guard = lock();
  if (closed_ || !engine().cancel(*receive)) return false;
  forget(*receive);
  independent_.erase(receive->place);
  return true;
}

void PointToPoint::startServer() {
  if (serving_) return;
  const SignalsBlocked blocked;
  try {
    startDetached(
        "tcpg_messages", [comm = comm_.shared_from_this()] { comm->pointToPoint().serve(); });
  } catch (const std::system_error& error) {
    throw NcclError(ncclSystemError, std::string("cannot start a thread: ") + error.what());
  }
  serving_ = true;
}

void PointToPoint::serve() {
  {
    const auto guard = lock();
    server_ = std::this_thread::get_id();
  }
  const auto due = [this] {
    const auto guard = lock();
    return closed_ || !serverMoves();
  };
  for (;;) {
    {
      auto guard = lock();
      work_.wait(guard, [this]() REQUIRES(mutex_) { return closed_ || serverMoves(); });
      if (closed_ && completed_.empty()) return;
    }
    callBackAll();
    try {
      comm_.waiter().wait(
          [&] { return progress(due) || due(); },
          [this](int rank) { return independentNeeds(rank); });
    } catch (const NcclError& failure) {
      close(std::make_shared<const NcclError>(failure));
    }
  }
}

bool PointToPoint::independentNeeds(int rank) {
  return stillNeeds(rank, [&] {
    const auto guard = lock();
    return std::any_of(independent_.begin(), independent_.end(), [&](const auto& transfer) {
      return needs(*transfer, rank);
    });
  });
}

void PointToPoint::callBackAll() {
  for (;;) {
    std::shared_ptr<Transfer> transfer;
    {
      const auto guard = lock();
      if (completed_.empty()) return;
      transfer = std::move(completed_.front());
      completed_.pop_front();
      ++callingBack_;
    }
    transfer->done(
        transfer->context, transfer->result, transfer->partner.load(std::memory_order_relaxed));
    ring();  // another thread may wait for something that `done` did
    const auto guard = lock();
    if (--callingBack_ == 0 && completed_.empty()) quiet_.notify_all();
  }
}

void PointToPoint::close(const std::shared_ptr<const NcclError>& why) {
  {
    const auto guard = lock();
    if (closed_) return;
    closedBy_ = why;
    closed_ = true;
    for (const auto& transfer : independent_) transfer->result = why->result;
    completed_.splice(completed_.end(), independent_);
    served_ = room_ = 0;
    engine_.reset();  // forgets all transfers
    work_.notify_all();
  }
  ring();
}

void PointToPoint::giveUp(const NcclError& why) {
  close(
      std::make_shared<const NcclError>(
          comm_.segment().failed() ? comm_.segment().failure() : why));
}

void PointToPoint::shutdown(const std::string& why) {
  giveUp(NcclError(ncclInvalidUsage, why));
  auto guard = lock();
  if (server_ == std::this_thread::get_id()) return;
  quiet_.wait_for(guard, kCallbackLimit, [this]() REQUIRES(mutex_) {
    return completed_.empty() && callingBack_ == 0;
  });
}

std::vector<int> PointToPoint::missingRanks() {
  const auto guard = lock();
  const Transfer* oldest = engine_ ? engine_->oldestPending() : nullptr;
  if (oldest == nullptr) return {};
  const int partner = oldest->partner.load(std::memory_order_relaxed);
  if (partner != kAnyPeer) return {partner};
  return comm_.segment().ranksWhere([this](int rank) { return rank != comm_.rank(); });
}

}  // namespace torchcomms_pg::shm
