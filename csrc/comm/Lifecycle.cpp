// How a communicator begins, divides and ends.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>
#include <utility>

#include "comm/Communicator.hpp"
#include "comm/Inquiring.hpp"
#include "device/AcceleratorDevice.hpp"
#include "nccl/Ending.hpp"
#include "shm/Interrupt.hpp"
#include "shm/Process.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::microseconds kTeardownPoll{200};

// Until when communicators that end are given little time: one of this process has just not come to
// its end, and what keeps it, such as a peer that is stopped, most likely keeps the others.
std::atomic<Clock::time_point> impatientUntil{};

}  // namespace

ncclComm_t Communicator::usable() const {
  TORCH_CHECK(
      pid_ == static_cast<pid_t>(shm::processId()),  // getpid() is a system call
      "group '",
      group_.name,
      "' was created before this process was forked and cannot be used here; create groups in the "
      "child");
  if (const auto failure = std::atomic_load(&failure_)) {
    raise(*failure);
  }
  auto* const comm = comm_.load(std::memory_order_acquire);
  TORCH_CHECK(
      (comm != nullptr || !initialized_.load(std::memory_order_acquire)) &&
          !closed_.load(std::memory_order_acquire),
      "group '",
      group_.name,
      "' has been shut down; create a new one");
  return comm;
}

bool Communicator::initialized() {
  if (C10_LIKELY(initialized_.load(std::memory_order_acquire))) {
    return true;
  }
  auto* const comm = usable();  // throws what the monitor finds, for example the deadline
  ncclResult_t state = ncclSuccess;
  if (joining_ != nullptr) {
    if (!joining_->done()) {
      return false;
    }
    const std::lock_guard lock(commMutex_);  // whoever makes it fail finds it here, or in the call
    if (initialized_.load(std::memory_order_relaxed)) {
      return true;
    }
    state = joining_->result();
    comm_.store(joining_->take(), std::memory_order_release);
    initialized_.store(state == ncclSuccess, std::memory_order_release);
  }
  const auto asked = joining_ != nullptr ? state : api_.commGetAsyncError(comm, &state);
  const auto result = asked != ncclSuccess ? asked : state;
  if (result != ncclSuccess && result != ncclInProgress) {
    Operation initialization;
    initialization.kind = OpKind::initialization;
    std::rethrow_exception(resultError(initialization, result));
  }
  initialized_.store(result == ncclSuccess, std::memory_order_release);
  return result == ncclSuccess;
}

void Communicator::awaitInitialization() {
  for (auto next = Clock::now() + kInterruptInterval; !initialized();) {
    std::this_thread::sleep_for(kTeardownPoll);
    if (Clock::now() >= next) {
      next = Clock::now() + kInterruptInterval;
      if (const auto raised = interruption()) {
        std::rethrow_exception(raised);
      }
    }
  }
}

ncclComm_t Communicator::handle() {
  awaitInitialization();
  return usable();
}

std::string Communicator::splitMistake(const std::vector<int>& ranks) const {
  std::string wrong;
  std::vector<bool> seen(size_, false);
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size_) {
      wrong = std::to_string(rank) + ", wanted ranks of 0 to " + std::to_string(size_ - 1);
      break;
    }
    if (seen[rank]) {
      wrong = std::to_string(rank) + " twice, wanted each rank once";
      break;
    }
    seen[rank] = true;
  }
  if (!wrong.empty()) {
    return "split: ranks [" + joinRanks(ranks) + "] name " + wrong;
  }
  if (ranks.empty() || seen[rank_]) {
    return "";
  }
  return "split: ranks [" + joinRanks(ranks) + "] do not include this rank, " +
         std::to_string(rank_) + "; pass the group that this rank is to be in, or an empty list";
}

std::string Communicator::splitDifference(
    const NcclApi& api, ncclComm_t child, const std::vector<int>& ranks, int key) const {
  int count = static_cast<int>(ranks.size());
  int position = key;
  api.commCount(child, &count);
  api.commUserRank(child, &position);
  if (count == static_cast<int>(ranks.size()) && position == key) {
    return "";
  }
  return "split: of the ranks [" + joinRanks(ranks) + "] only " + std::to_string(count) +
         " have passed this list; pass the same on all ranks of a group";
}

std::shared_ptr<Communicator> Communicator::split(
    const std::vector<int>& ranks,
    Group group,
    Milliseconds timeout,
    const std::optional<NcclConfig>& config,
    bool named) {
  // A rank with a wrong list takes part all the same, as one of no group: else those with a good
  // one would wait for it.
  const auto wrong = splitMistake(ranks);
  const auto position = std::find(ranks.begin(), ranks.end(), rank_);
  const bool member = position != ranks.end() && wrong.empty();
  // Groups of one split are disjoint, so their first ranks tell them apart; different lists with
  // the same first rank make different groups, all of whose ranks see that some are missing.
  const auto lists = static_cast<uint32_t>(std::numeric_limits<int>::max() / size_);
  const auto list = static_cast<uint32_t>(std::hash<std::string>{}(joinRanks(ranks))) % lists;
  const int color = member ? ranks.front() + static_cast<int>(list) * size_ : NCCL_SPLIT_NOCOLOR;
  const int key = member ? static_cast<int>(position - ranks.begin()) : rank_;

  auto chosen = config.value_or(config_);
  chosen.check(api_);
  if (named) {
    chosen = chosen.named(api_, group.name);
  }
  ncclComm_t child = nullptr;
  auto call = newCall(OpKind::split, {.async = false, .timeout = timeout});
  call.ranks.assign(ranks.begin(), ranks.end());
  call.newName = group.name;
  call.launch = [&](ncclComm_t comm, cudaStream_t) {
    auto raw = chosen.raw(/*blocking=*/accelerator_ != nullptr);
    return api_.commSplit(comm, color, key, &child, &raw);
  };
  launch(std::move(call), nullptr);
  TORCH_CHECK_VALUE(wrong.empty(), wrong);
  const auto seq = sequenceNumber();
  if (child == nullptr) {
    return nullptr;
  }
  const auto& api = api_.libraryOf == nullptr ? api_ : api_.libraryOf(child);
  for (const int rank : ranks) {
    if (!group_.hosts.empty() && api.probe != nullptr) {
      group.hosts.push_back(group_.hosts[rank]);
    }
  }
  const auto difference = splitDifference(api, child, ranks, key);
  auto made = std::make_shared<Communicator>(
      api,
      Made{child},
      key,
      static_cast<int>(ranks.size()),
      std::move(group),
      timeout,
      device_->another(),
      chosen);
  if (!difference.empty()) {
    const std::lock_guard lock(commMutex_);
    refused_.push_back(std::move(made));
    TORCH_CHECK_VALUE(false, difference);
  }
  made->inquiring_->openLike(
      *inquiring_, "split/" + std::to_string(seq) + "/" + std::to_string(color));
  return made;
}

ncclComm_t Communicator::shrinkLibrary(
    ncclComm_t comm,
    std::vector<int> excluded,
    int flags,
    const Operation& op,
    Clock::time_point deadline) {
  const auto shrinkNow = [&api = api_, comm, excluded = std::move(excluded), flags](
                             ncclComm_t* made, ncclConfig_t raw) {
    auto gone = excluded;
    return api.commShrink(comm, gone.data(), static_cast<int>(gone.size()), made, &raw, flags);
  };
  auto result = ncclSuccess;
  std::string text;
  ncclComm_t made = nullptr;
  if (accelerator_ == nullptr) {
    // The child goes on by itself.
    result = shrinkNow(&made, config_.raw(/*blocking=*/false));
    text = api_.getLastError(comm);
  } else {
    BlockingCall call(api_, device(), [shrinkNow, config = config_](ncclComm_t* place) {
      return shrinkNow(place, config.raw(/*blocking=*/true));
    });
    result = call.waitUntil(deadline) ? call.result() : ncclInProgress;
    text = call.text();
    made = call.take();
  }
  if (made == nullptr) {
    const bool late = result == ncclInProgress;
    throw CommError(describeFailure(
        late ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR,
        op,
        late ? "timed out after " + inSeconds(op.timeout) + ": not all ranks that stay have come"
             : text));
  }
  return made;
}

std::shared_ptr<Communicator> Communicator::shrink(
    const std::vector<int>& excluded, bool abort, Group group, Milliseconds timeout) {
  TORCH_CHECK(
      api_.commShrink != nullptr, "shrink: the loaded NCCL lacks it; it came with NCCL 2.27.3");
  auto gone = excluded;
  std::sort(gone.begin(), gone.end());
  TORCH_CHECK_VALUE(
      !gone.empty() && gone.front() >= 0 && gone.back() < size_ &&
          std::adjacent_find(gone.begin(), gone.end()) == gone.end(),
      "shrink: excluded ranks must be distinct and in 0 .. ",
      size_ - 1,
      ", got [",
      joinRanks(excluded),
      "]");
  TORCH_CHECK_VALUE(
      !std::binary_search(gone.begin(), gone.end(), rank_),
      "shrink: this rank (",
      rank_,
      ") is among the excluded ones; only the ranks that stay call it");

  // Not through launch(): a failed communicator can be shrunk, that is what
  // shrinking is for.
  auto call = newCall(OpKind::shrink, {.async = false, .timeout = timeout});
  TORCH_CHECK(!closed_, "shrink: group '", group_.name, "' has been shut down");
  const auto deadline = Clock::now() + timeout;
  while (libraryFailed_ && !libraryReleased_ && Clock::now() < deadline) {
    std::this_thread::sleep_for(kTeardownPoll);  // it is being revoked
  }
  ncclComm_t child = nullptr;
  const auto shrinkNow = [&] {
    call.op.seq = collectives_.fetch_add(1) + 1;
    call.op.issued = Clock::now();
    if (!failure()) {
      const auto entry = enter(call.op, nullptr);
      try {
        awaitInitialization();
      } catch (const std::exception&) {
        // It has failed meanwhile, which does not keep it from being shrunk.
      }
      leave(entry);
    }
    auto* const comm = comm_.load(std::memory_order_acquire);
    TORCH_CHECK(
        comm != nullptr,
        "shrink: the communicator of group '",
        group_.name,
        "' for ",
        device(),
        " was aborted when it failed, and is gone: the loaded NCCL lacks ncclCommRevoke, which "
        "came with 2.28.7. Destroy the group and create a new one");
    if (abort && accelerator_ != nullptr) {
      failInFlight();
    }
    const int flags = abort ? NCCL_SHRINK_ABORT : NCCL_SHRINK_DEFAULT;
    std::exception_ptr error;
    try {
      child = shrinkLibrary(comm, gone, flags, call.op, deadline);
    } catch (...) {
      error = std::current_exception();
    }
    tellEnd(call.op, nullptr, error, call.op.issued, Clock::now());
    if (error) {
      std::rethrow_exception(error);
    }
  };
  if (hooks_->any()) {
    for (int rank = 0; rank < size_; ++rank) {
      if (!std::binary_search(gone.begin(), gone.end(), rank)) {
        call.ranks.push_back(rank);
      }
    }
    call.newName = group.name;
    const auto id = Hooks::nextOpId();
    call.op.hooked = std::make_shared<HookedOperation>(OpName::shrink, id, hooks_->table());
    runHooked(hookArgs(call, id), shrinkNow);
  } else {
    shrinkNow();
  }
  const auto before = std::lower_bound(gone.begin(), gone.end(), rank_) - gone.begin();
  auto made = std::make_shared<Communicator>(
      api_,
      Made{child},
      rank_ - static_cast<int>(before),
      size_ - static_cast<int>(gone.size()),
      std::move(group),
      timeout,
      device_->another(),
      config_);
  made->inquiring_->openLike(*inquiring_, "without/" + joinRanks(gone));
  return made;
}

void Communicator::failInFlight() {
  {
    std::lock_guard lock(inFlightMutex_);
    if (inFlight_.empty()) {
      return;
    }
  }
  // NCCL ends their kernels, and says nothing of it.
  setFailure(
      {c10d::ErrorType::COMM_ERROR,
       "group '" + group_.name + "' was shrunk on rank " + std::to_string(rank_) +
           ", which ended its operations",
       "",
       0,
       group_.name,
       {rank_},
       {}},
      Cause::requested);
}

std::exception_ptr Communicator::interruption() {
  if (!shm::interrupted()) {
    return nullptr;
  }
  failBy(kInterrupt);
  return shm::takeInterrupt();
}

void Communicator::abort(const std::string& why) {
  failBy(why);
  awaitFailureHook();
}

void Communicator::failBy(const std::string& why) {
  const auto ours = setFailure(
      {c10d::ErrorType::COMM_ERROR,
       "group '" + group_.name + "' was aborted on rank " + std::to_string(rank_) + " by " + why,
       "",
       0,
       group_.name,
       {rank_},
       {}},
      Cause::requested);
  failLibrary(*ours);
}

void Communicator::giveUp(const char* why) noexcept {
  try {
    {
      std::lock_guard lock(inFlightMutex_);
      if (inFlight_.empty()) {
        return;
      }
    }
    failBy(why);
  } catch (...) {
    // Out of memory while describing it; the caller does not wait forever.
  }
}

void Communicator::drain(Milliseconds messages) {
  hasten();
  const auto start = Clock::now();
  const auto nothing = [&] {
    const bool patient = Clock::now() - start < messages;
    return std::ranges::all_of(
        inFlight_, [patient](const InFlight& entry) { return !patient && !entry.op->ordered; });
  };
  std::unique_lock lock(inFlightMutex_);
  if (accelerator_ == nullptr) {
    std::exception_ptr raised;
    while (!drained_.wait_for(lock, raised ? kReleasePatience : kInterruptInterval, nothing)) {
      if (raised) {
        break;  // what does not end is left, as it was when the program was stopped
      }
      lock.unlock();
      raised = interruption();
      lock.lock();
    }
    if (raised) {
      std::rethrow_exception(raised);
    }
    return;
  }
  // A device that does not let go of a failed operation is not waited for.
  const EventWatch::Hurry hurry(accelerator_->watch());
  std::optional<Clock::time_point> failed;
  while (!drained_.wait_for(lock, kInterruptInterval, nothing)) {
    if (!failed && failure()) {
      failed = Clock::now();
    }
    if (failed && Clock::now() - *failed > kReleasePatience) {
      return;
    }
  }
}

void Communicator::close() {
  if (closed_.load(std::memory_order_acquire) || pid_ != getpid()) {
    return;
  }
  std::exception_ptr mismatch;  // what closeNow tells, and no hook
  const auto end = [this, &mismatch] {
    try {
      closeNow();
    } catch (...) {
      mismatch = std::current_exception();
      throw;
    }
  };
  if (hooks_->any()) {
    auto before = std::make_shared<PreHookArgs>();
    before->name = OpName::finalize;
    before->opId = Hooks::nextOpId();
    try {
      runHooked(std::move(before), end);
    } catch (const std::exception& error) {
      if (!mismatch) {
        TORCH_WARN(
            "a hook raised when group '", group_.name, "' ended, which it does: ", error.what());
      }
    }
  }
  try {
    end();         // no hook can cancel it
  } catch (...) {  // mismatch has it
  }
  // A hook may hold on to what holds on to the communicator.
  hooks_->clear();
  if (mismatch) {
    std::rethrow_exception(mismatch);
  }
}

void Communicator::closeNow() {
  if (closed_.exchange(true, std::memory_order_acq_rel)) {
    return;
  }
  std::exception_ptr interrupted;
  try {
    drain(group_.backend == "gloo" ? kMessagePatience : Milliseconds::max());
  } catch (...) {
    interrupted = std::current_exception();
  }
  release();
  if (interrupted) {
    std::rethrow_exception(interrupted);
  }
}

// Of a group that ends while its ranks are still joining: what the other ranks need this one for.
void Communicator::awaitJoined() {
  if (joining_ == nullptr || initialized_.load(std::memory_order_acquire)) {
    return;
  }
  if (!failure() && joining_->waitUntil(Clock::now() + kReleasePatience)) {
    const std::lock_guard lock(commMutex_);
    comm_.store(joining_->take(), std::memory_order_release);
  }
  joining_->leave();
}

// Gives everything back, when nothing is in flight any more.
void Communicator::release() {
  inquiring_->close();
  hooks_->drain();
  std::unique_lock failing(failMutex_, kReleasePatience);
  if (!failing.owns_lock()) {
    return;  // libnccl hangs in its own failure; better to leave it than to hang too
  }
  awaitJoined();
  ncclComm_t comm = nullptr;
  decltype(refused_) refused;  // freed after the lock is released
  {
    std::lock_guard lock(commMutex_);
    comm = comm_.exchange(nullptr, std::memory_order_acq_rel);
    refused.swap(refused_);
  }
  awaitFailureHook();
  if (comm == nullptr) {
    return;
  }
  std::string mismatch;
  const auto failed = failure();
  // Of what does not match the caller is told here, where the monitor alone has learned of it.
  ncclResult_t state = ncclSuccess;
  const bool untold = failed && failed->type == c10d::ErrorType::REMOTE_ERROR &&
                      !told_.load(std::memory_order_relaxed) &&
                      api_.commGetAsyncError(comm, &state) == ncclSuccess &&
                      state == ncclInvalidUsage;
  endLibrary(comm, failed != nullptr, mismatch);
  {
    decltype(droppedWindows_) dropped;  // freed after the lock is released
    std::lock_guard lock(windowMutex_);
    dropped.swap(droppedWindows_);
  }
  failing.unlock();
  if (untold) {
    throw CommError(*failed);
  }
  if (!mismatch.empty()) {
    tellMismatch(mismatch);
  }
}

// Gives the library's communicator back. `mismatch`: what the library says of operations that do
// not match.
void Communicator::endLibrary(ncclComm_t comm, bool failed, std::string& mismatch) {
  if (failed) {
    registrations_.forget();
  } else {
    registrations_.removeAll();
  }
  const bool ofNccl = accelerator_ != nullptr;
  const auto end = [&api = api_, comm, failed, ofNccl](std::string& text) {
    if (failed) {
      return api.commAbort(comm);
    }
    // That a peer has left or failed meanwhile concerns nobody who leaves, too.
    const auto result = api.commFinalize(comm);
    if (result == ncclInvalidUsage) {
      text = api.getLastError(comm);
    }
    ofNccl ? destroyOrAbort(api, comm) : api.commDestroy(comm);
    return result;
  };
  if (!ofNccl) {
    end(mismatch);
    return;
  }
  const auto text = std::make_shared<std::string>();
  try {
    BlockingCall call(api_, device(), [end, text](ncclComm_t*) { return end(*text); });
    // NCCL's communicator ends when the graphs that hold its operations have gone.
    const bool impatient = captured_ || Clock::now() < impatientUntil.load();
    const auto patience = impatient ? kBriefPatience : Milliseconds(kReleasePatience);
    if (call.waitUntil(Clock::now() + patience)) {
      mismatch = *text;
    } else if (!captured_) {
      impatientUntil = Clock::now() + kReleasePatience;
    }
  } catch (const std::runtime_error&) {
    end(mismatch);  // no thread can be started
  }
}

void Communicator::tellMismatch(const std::string& what) {
  Failure failure;
  failure.group = group_.name;
  failure.message = "group '" + group_.name + "' on rank " + std::to_string(rank_) +
                    " ends with operations that do not match: " + what;
  if (setFailure(failure)) {
    awaitFailureHook();
    throw CommError(failure);
  }
}

}  // namespace torchcomms_pg
