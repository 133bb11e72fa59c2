#include "handle/CommHandle.hpp"

#include <thread>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/SharedPatience.hpp"
#include "device/AcceleratorDevice.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg {

namespace {

// Limit of the time for which failNow() waits for a thread that launches an operation.
constexpr std::chrono::seconds kOrderPatience{1};

// Limit of the wait for libnccl to end a communicator.
SharedPatience endPatience{CommHandle::kReleasePatience};

void giveBack(const Library& api, ncclComm_t comm, bool failed, bool blocks) {
  if (!failed && blocks) {
    // libnccl refuses to destroy a communicator whose peers are gone, keeps its memory, and from
    // 2.24 on leaves the calling thread's group open (src/init.cc, ncclCommDestroy).
    auto state = ncclSuccess;
    failed = api.commGetAsyncError(comm, &state) != ncclSuccess || state != ncclSuccess;
  }
  failed ? api.commAbort(comm) : api.commDestroy(comm);
}

}  // namespace

CommHandle::CommHandle(const Library& api, Made made, c10::Device device)
    : api_(api),
      device_(device),
      blocks_(!device.is_cpu()),
      comm_(made.comm),
      joining_(std::move(made.call)),
      registrations_(api) {}

ncclResult_t CommHandle::join() {
  ncclResult_t state = ncclSuccess;
  if (joining_ != nullptr) {
    if (!joining_->done()) {
      return ncclInProgress;
    }
    const LockGuard lock(mutex_);  // failNow() finds the communicator in comm_ or joining_
    if (ready_.load(std::memory_order_relaxed)) {
      return ncclSuccess;
    }
    state = joining_->result();
    comm_.store(joining_->take(), std::memory_order_release);
    ready_.store(state == ncclSuccess, std::memory_order_release);
    return state;
  }
  const auto asked = api_.commGetAsyncError(get(), &state);
  state = asked != ncclSuccess ? asked : state;
  ready_.store(state == ncclSuccess, std::memory_order_release);
  return state;
}

ncclResult_t CommHandle::state(ncclResult_t freed) const {
  auto result = freed;
  with([&](ncclComm_t comm) {
    auto state = ncclSuccess;
    const auto asked = api_.commGetAsyncError(comm, &state);
    result = asked == ncclSuccess ? state : asked;
  });
  return result;
}

host::NcclError CommHandle::report() const {
  if (!process_.isThis()) {
    return {ncclSuccess, ""};
  }
  LockGuard lock(mutex_);
  if (auto* const comm = get()) {
    std::string text = api_.getLastError(comm);
    auto state = ncclSuccess;
    api_.commGetAsyncError(comm, &state);
    if (blocks_ && state != ncclSuccess && state != ncclInProgress) {
      // libnccl keeps only the latest text of the process (src/init.cc, ncclGetLastError).
      const auto latest = std::exchange(text, api_.getErrorString(state));
      text += latest.empty()
                  ? ""
                  : "; NCCL's latest message in this process, maybe of another group: " + latest;
    }
    return {state, text, api_.missingRanks(comm)};
  }
  if (joining_ != nullptr) {
    const auto text = joining_->text();
    return {joining_->done() ? joining_->result() : ncclSuccess, text};
  }
  return {ncclSuccess, ""};
}

std::vector<int> CommHandle::missingRanks() const {
  std::vector<int> absent;
  with([&](ncclComm_t comm) { absent = api_.missingRanks(comm); });
  return absent;
}

uint64_t CommHandle::ring(uint64_t times) const {
  uint64_t rings = 0;
  with([&](ncclComm_t comm) { rings = api_.ring(comm, times); });
  return rings;
}

void CommHandle::fail(const Failure& failure, std::shared_ptr<const void> owner) {
  if (api_.has(Feature::fail)) {
    auto result = ncclSuccess;
    with([&](ncclComm_t comm) {
      result = api_.fail(comm, ncclRemoteError, failure.message, failure.ranks);
    });
    if (result == ncclSystemError) {
      throw host::NcclError(result, "out of memory");  // the caller may try again
    }
    return;
  }
  if (!process_.isThis() || failing_.exchange(true)) {
    return;
  }
  // NCCL may block until its kernels have ended. The caller must not block.
  try {
    Monitor::get().runDetached(
        [unfinished = ExitGuard(), owner = std::move(owner), this] { failNow(); });
  } catch (...) {
    failing_ = false;  // the caller may try again
    throw;
  }
}

void CommHandle::failNow() {
  const std::lock_guard failing(failMutex_);
  try {
    if (blocks_) {
      takeDevice(device_);
    }
  } catch (const std::exception&) {
    // The driver is being unloaded, or the device has failed: the library's calls will fail, too.
  }
  ncclComm_t comm = nullptr;
  {
    const LockGuard lock(mutex_);
    comm = get();
    if (comm == nullptr && joining_ != nullptr) {
      joining_->leave();  // a call that waits for ranks cannot be aborted
    }
  }
  auto state = ncclInvalidUsage;
  if (comm != nullptr && api_.has(Feature::revoke)) {
    // While NCCL revokes, no thread may launch: the launched operation would spin for ever. The
    // wait for a launching thread is limited, since only the revocation releases a thread that is
    // stuck in a launch.
    const std::unique_lock order(orderMutex_, kOrderPatience);
    state = api_.commRevoke(comm, NCCL_REVOKE_DEFAULT);
  }
  bool revoked = state == ncclSuccess;
  // Over shared memory, commRevoke may return before the revocation has ended. The communicator may
  // still report the failure then: any state but ncclInProgress means that the revocation has
  // ended.
  const auto patience = Clock::now() + kReleasePatience;
  while (state == ncclInProgress && Clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    revoked = api_.commGetAsyncError(comm, &state) == ncclSuccess && state != ncclInProgress;
  }
  if (revoked) {
    comm = nullptr;
    revoked_.store(true, std::memory_order_relaxed);
  } else {
    LockGuard lock(mutex_);
    comm = comm_.exchange(nullptr, std::memory_order_acq_rel);
  }
  released_.store(true, std::memory_order_release);
  if (comm != nullptr) {
    registrations_.forget();
    api_.commAbort(comm);
  }
}

ncclComm_t CommHandle::shrink(
    const std::vector<int>& excluded, int flags, const NcclConfig& config,
    Clock::time_point deadline) const {
  const auto make = [comm = get(), flags, config, deadline, &api = api_, blocks = blocks_,
                     excluded](ncclComm_t* made) {
    auto raw = config.raw(blocks);
    auto gone = excluded;
    return api.shrink(comm, gone, made, &raw, flags, deadline);
  };
  if (!blocks_) {
    // The child goes on initializing in the background.
    ncclComm_t made = nullptr;
    const auto result = make(&made);
    if (made == nullptr) throw host::NcclError(result, api_.getLastError(nullptr));
    return made;
  }
  BlockingCall call(api_, device_, make);
  const bool ended = call.waitUntil(deadline);
  const host::NcclError error(ended ? call.result() : ncclInProgress, call.text());
  auto* const made = call.take();
  if (made == nullptr) throw error;
  return made;
}

void CommHandle::endJoining(bool failed) {
  if (joining_ == nullptr || ready()) {
    return;
  }
  if (!failed && joining_->waitUntil(Clock::now() + kReleasePatience)) {
    const LockGuard lock(mutex_);
    comm_.store(joining_->take(), std::memory_order_release);
  }
  joining_->leave();
}

std::string CommHandle::close(bool failed) {
  if (!process_.isThis()) {
    return "";
  }
  const std::unique_lock failing(failMutex_, kReleasePatience);
  if (!failing.owns_lock()) {
    return "";  // failNow() hangs in libnccl: leaks the communicator
  }
  endJoining(failed);
  ncclComm_t comm = nullptr;
  {
    LockGuard lock(mutex_);
    comm = comm_.exchange(nullptr, std::memory_order_acq_rel);
  }
  auto mismatch = comm != nullptr ? end(comm, failed) : "";
  decltype(kept_) kept;  // freed after the lock is released
  LockGuard lock(keptMutex_);
  kept.swap(kept_);
  return mismatch;
}

template <class Body>
std::unique_ptr<BlockingCall> CommHandle::endDetached(Body body) const {
  if (blocks_) {
    try {
      return std::make_unique<BlockingCall>(api_, device_, [body](ncclComm_t*) {
        body();
        return ncclSuccess;
      });
    } catch (const std::runtime_error&) {
      // No thread can be started: calls `body` in this thread.
    }
  }
  body();
  return nullptr;
}

std::string CommHandle::end(ncclComm_t comm, bool failed) {
  if (failed) {
    registrations_.forget();
  } else {
    registrations_.removeAll();
  }
  if (leftToGraphs()) {
    return "";
  }
  const auto mismatch = std::make_shared<std::string>();
  const auto call = endDetached([&api = api_, comm, failed, blocks = blocks_, mismatch] {
    // Reports only a mismatch: other errors mean that a peer has left or failed, which does not
    // matter to a rank that is leaving, too.
    if (!failed && api.commFinalize(comm) == ncclInvalidUsage) {
      *mismatch = api.getLastError(comm);
    }
    giveBack(api, comm, failed, blocks);
  });
  if (call == nullptr) {
    return *mismatch;
  }
  const auto wait = [&](Milliseconds patience) { return call->waitUntil(Clock::now() + patience); };
  // NCCL's communicator ends only after the graphs that hold its operations.
  const bool ended = captured_ ? wait(SharedPatience::kBrief) : endPatience.spend(wait);
  return ended ? *mismatch : "";
}

void CommHandle::discard(bool failed) {
  registrations_.forget();
  if (auto* const comm = comm_.exchange(nullptr); comm != nullptr && !leftToGraphs()) {
    endDetached(
        [&api = api_, comm, failed, blocks = blocks_] { giveBack(api, comm, failed, blocks); });
  }
}

void CommHandle::forget() {
  registrations_.forget();
  comm_.store(nullptr);
}

void CommHandle::keepUntilEnd(std::shared_ptr<const void> object) {
  LockGuard lock(keptMutex_);
  kept_.push_back(std::move(object));
}

}  // namespace torchcomms_pg
