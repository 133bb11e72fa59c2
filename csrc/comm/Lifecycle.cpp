// Splitting, shrinking and ending a communicator.
#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "comm/Communicator.hpp"
#include "comm/OpenCall.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::microseconds kRevokePoll{200};

// Limit of the wait for messages at the end of a group that stands for Gloo, which drops them.
// Without the limit, two ranks with an unreceived message for each other would wait until the
// deadline.
constexpr Milliseconds kMessagePatience{2000};

// Describes the mistake in the list that rank `self` of `size` ranks passes to split(). Returns ""
// if the list is correct.
std::string splitMistake(const std::vector<int>& ranks, int self, int size) {
  std::string wrong;
  std::vector<bool> seen(size, false);
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size) {
      wrong = std::to_string(rank) + ", wanted ranks of 0 to " + std::to_string(size - 1);
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
  if (ranks.empty() || seen[self]) {
    return "";
  }
  return "split: ranks [" + joinRanks(ranks) + "] do not include this rank, " +
         std::to_string(self) + "; pass the group that this rank is to be in, or an empty list";
}

// Describes the difference if some of `ranks` have passed other lists and are not in `child`.
// Returns "" if all have passed the same list.
std::string splitDifference(
    const Library& api, ncclComm_t child, const std::vector<int>& ranks, int key) {
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

}  // namespace

std::shared_ptr<Communicator> Communicator::split(
    const std::vector<int>& ranks, Group group, Milliseconds timeout,
    const std::optional<NcclConfig>& config, bool named) {
  // A rank with a wrong list takes part nevertheless, as a member of no group: otherwise the ranks
  // with a correct list would wait for this rank.
  const auto wrong = splitMistake(ranks, rank_, size_);
  const auto position = std::ranges::find(ranks, rank_);
  const bool member = position != ranks.end() && wrong.empty();
  // The color contains the first rank, which differs between the groups of one split, since these
  // are disjoint. It also contains a hash of the list: ranks with different lists get into
  // different groups, and each finds that ranks of its list are missing.
  const auto lists = static_cast<uint32_t>(std::numeric_limits<int>::max() / size_);
  const auto text = joinRanks(ranks);
  const auto list = static_cast<uint32_t>(host::hashBytes(text.data(), text.size())) % lists;
  const int color = member ? ranks.front() + static_cast<int>(list) * size_ : NCCL_SPLIT_NOCOLOR;
  const int key = member ? static_cast<int>(position - ranks.begin()) : rank_;

  auto chosen = config.value_or(config_);
  chosen.check(api());
  if (named) {
    chosen = chosen.named(api(), group.name);
  }
  ncclComm_t child = nullptr;
  auto call = prepare(OpKind::split, {.async = false, .timeout = timeout});
  call.ranks.assign(ranks.begin(), ranks.end());
  call.newName = group.name;
  call.task = [&](ncclComm_t comm, cudaStream_t) {
    ++splits_;
    auto raw = chosen.raw(/*blocking=*/library_.blocks());
    return api().commSplit(comm, color, key, &child, &raw);
  };
  launch(std::move(call));
  TORCH_CHECK_VALUE(wrong.empty(), wrong);
  const auto seq = sequenceNumber();
  if (child == nullptr) {
    return nullptr;
  }
  const auto& ofChild = api().libraryOf(child);
  for (const int rank : ranks) {
    if (!group_.hosts.empty() && ofChild.has(Feature::probe)) {
      group.hosts.push_back(group_.hosts[rank]);
    }
  }
  const auto difference = splitDifference(ofChild, child, ranks, key);
  auto made = Monitor::watch<Communicator>(
      ofChild, CommHandle::Made{child}, key, static_cast<int>(ranks.size()), std::move(group),
      timeout, place_, chosen);
  if (!difference.empty()) {
    library_.keepUntilEnd(std::move(made));  // other ranks may still be connecting to it
    TORCH_CHECK_VALUE(false, difference);
  }
  made->watchdog_.openLike(
      watchdog_, "split/" + std::to_string(seq) + "/" + std::to_string(color), ranks);
  return made;
}

std::shared_ptr<Communicator> Communicator::shrink(
    const std::vector<int>& excluded, bool abort, Group group, Milliseconds timeout) {
  TORCH_CHECK(
      api().has(Feature::shrink), "shrink: ",
      device().is_cpu()
          ? "the ranks of group '" + group_.name +
                "' are on several hosts, where groups of CPU tensors cannot shrink; have the ranks "
                "that stay make a new group, with new_group or init_process_group"
          : std::string("the loaded NCCL lacks it; it came with NCCL ") +
                introduced(Feature::shrink).version);
  auto gone = excluded;
  std::ranges::sort(gone);
  TORCH_CHECK_VALUE(
      !gone.empty() && gone.front() >= 0 && gone.back() < size_ &&
          std::ranges::adjacent_find(gone) == gone.end(),
      "shrink: excluded ranks must be distinct and in 0 .. ", size_ - 1, ", got [",
      joinRanks(excluded), "]");
  TORCH_CHECK_VALUE(
      !std::binary_search(gone.begin(), gone.end(), rank_), "shrink: this rank (", rank_,
      ") is among the excluded ones; only the ranks that stay call it");

  // Does not call launch(), which would raise: a failed communicator can be shrunk, too.
  OpenCall::refuse(*this, name(OpKind::shrink));
  auto call = prepare(OpKind::shrink, {.async = false, .timeout = timeout});
  TORCH_CHECK(!closed(), "shrink: group '", group_.name, "' has been shut down");
  const auto deadline = Clock::now() + timeout;
  while (library_.failing() && Clock::now() < deadline) {
    std::this_thread::sleep_for(kRevokePoll);
  }
  ncclComm_t child = nullptr;
  const auto shrinkNow = [&] {
    const OpenCall open(*this, &call.op);
    call.op.seq = sequenceNumber() + 1;  // not counted: the excluded ranks do not shrink
    call.op.issued = Clock::now();
    if (!failureState_.get()) {
      const auto entry = inFlight_.add(call.op);
      bool initialized = false;
      try {
        joining_.awaitInitialization(call.op);
        initialized = true;
      } catch (const std::exception&) {
        // The communicator has failed meanwhile, but can be shrunk nevertheless.
      }
      inFlight_.end(entry, {.completed = initialized});
      inFlight_.remove(entry);
    }
    TORCH_CHECK(
        library_.get() != nullptr, "shrink: the communicator of group '", group_.name, "' for ",
        device(), " was aborted when it failed, and is gone: the loaded NCCL lacks ",
        introduced(Feature::revoke).functions, ", which came with ",
        introduced(Feature::revoke).version, ". Destroy the group and create a new one");
    if (abort && queues()) {
      failureState_.shrink();
    }
    const int flags = abort ? NCCL_SHRINK_ABORT : NCCL_SHRINK_DEFAULT;
    std::exception_ptr error;
    try {
      child = library_.shrink(gone, flags, config_, deadline);
    } catch (const host::NcclError& why) {
      const bool late = why.result == ncclInProgress;
      error = std::make_exception_ptr(CommError(failureState_.describe(
          late ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR, call.op,
          late ? "timed out after " + inSeconds(call.op.timeout) +
                     ": not all ranks that stay have come"
               : why.what())));
    } catch (...) {
      error = std::current_exception();
    }
    hooks()->tellEnd(call.op, nullptr, error, call.op.issued, Clock::now());
    if (error) {
      std::rethrow_exception(error);
    }
  };
  if (hooks()->any()) {
    for (int rank = 0; rank < size_; ++rank) {
      if (!std::binary_search(gone.begin(), gone.end(), rank)) {
        call.ranks.push_back(rank);
      }
    }
    call.newName = group.name;
    const auto id = Hooks::nextOpId();
    call.op.hooked = std::make_shared<HookedOperation>(OpName::shrink, id, hooks()->table());
    hooks()->run(Hooks::argsOf(call, id), shrinkNow);
  } else {
    shrinkNow();
  }
  const auto before = std::lower_bound(gone.begin(), gone.end(), rank_) - gone.begin();
  auto made = Monitor::watch<Communicator>(
      api(), CommHandle::Made{child}, rank_ - static_cast<int>(before),
      size_ - static_cast<int>(gone.size()), std::move(group), timeout, place_, config_);
  made->watchdog_.openShrunk(watchdog_, gone);
  return made;
}

void Communicator::drain() {
  library_.process().check(group_.name);
  OpenCall::refuse(*this, "wait for pending works");
  const OpenCall open(*this, nullptr);
  executor_->drain(Milliseconds::max());
}

void Communicator::close() {
  if (!ofThisProcess()) {
    return;
  }
  if (OpenCall::around(*this) != nullptr) {
    failureState_.failBy("the handler of a signal, which has ended it");
  }
  if (closed()) {
    return;
  }
  std::exception_ptr mismatch;  // exception of closeNow(), as opposed to a hook's
  const auto endNow = [this, &mismatch] {
    try {
      closeNow();
    } catch (...) {
      mismatch = std::current_exception();
      throw;
    }
  };
  if (hooks()->any()) {
    try {
      hooks()->run(std::make_shared<PreHookArgs>(OpName::finalize, Hooks::nextOpId()), endNow);
    } catch (const std::exception& error) {
      if (!mismatch) {
        TORCH_WARN(
            "a hook raised when group '", group_.name, "' ended, which it does: ", error.what());
      }
    }
  }
  try {
    endNow();      // no hook can cancel the end
  } catch (...) {  // `mismatch` has the exception
  }
  // Clears the hooks, since a hook may keep the communicator alive.
  if (auto* const call = OpenCall::around(*this)) {
    call->afterwards([hooks = hooks()] { hooks->clear(); });
  } else {
    hooks()->clear();
  }
  if (mismatch) {
    std::rethrow_exception(mismatch);
  }
}

void Communicator::closeNow() {
  if (!ofThisProcess() || !library_.beginEnd()) {
    return;
  }
  if (auto* const call = OpenCall::around(*this)) {
    call->afterwards([self = self()] { self->end(); });
    return;
  }
  end();
}

void Communicator::end() {
  const OpenCall open(*this, nullptr);
  batches_.dropEnded();
  std::exception_ptr interrupted;
  try {
    executor_->drain(group_.standsForGloo() ? kMessagePatience : Milliseconds::max());
  } catch (...) {
    interrupted = std::current_exception();
  }
  // Frees everything. Operations are still in flight only if the wait was interrupted or gave up.
  observer_->close();
  hooks()->drain();
  failureState_.awaitHooks();
  const auto failed = failureState_.get();
  const auto state = failed ? library_.state() : ncclSuccess;
  const auto mismatch = library_.close(failed != nullptr);
  if (interrupted) {
    std::rethrow_exception(interrupted);
  }
  // Reports operations that do not match, if so far only the monitor has learned of them.
  if (failed && failed->type == c10d::ErrorType::REMOTE_ERROR && !failureState_.told() &&
      state == ncclInvalidUsage) {
    throw CommError(*failed);
  }
  if (!mismatch.empty()) {
    const Failure failure{
        .message = "group '" + group_.name + "' on rank " + group_.numberOf(rank_) +
                   " ends with operations that do not match: " + mismatch,
        .group = group_.name};
    failureState_.set(failure);
    failureState_.awaitHooks();
    throw CommError(failure);
  }
}

void Communicator::inheritFrom(const Communicator& former) {
  groupHooks_.inherit(former.groupHooks_);
  recorders_.inherit(former.recorders_);
}

void Communicator::retire(const char* why) {
  abortInFlight(why);
  closeNow();
}

}  // namespace torchcomms_pg
