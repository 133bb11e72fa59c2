#include "shm/collective/Plan.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>

#include "shm/Host.hpp"
#include "shm/collective/Algorithms.hpp"

namespace torchcomms_pg::shm {
namespace {

void addUnique(std::vector<cudaStream_t>& streams, cudaStream_t stream) {
  if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
}

}  // namespace

void Plan::addStream(cudaStream_t stream) {
  addUnique(streams_, stream);
}

Plan Plan::again() const {
  Plan other(*this);
  for (auto& transfer : other.transfers_) transfer = transfer->again();
  return other;
}

void Plan::launch(bool now) {
  for (const auto& transfer : transfers_) comm_->pointToPoint().add(transfer);
  if (!collectives_.empty()) ticket_ = comm_->ticketLock().take();
  const bool alone = transfers_.empty() && puts_.empty() && waits_.empty();
  if (now && alone && collectives_.size() == 1) {
    begun_ = comm_->begin(ticket_, collectives_.front());
  }
  comm_->planIssued();
}

ncclResult_t Plan::execute() noexcept {
  struct End {
    Comm& comm;
    ~End() { comm.planEnded(); }
  } end{*comm_};
  const auto failed = [this](const NcclError& cause) {
    comm_->fail(cause);
    const NcclError failure = comm_->segment().failure();
    comm_->setLastError(failure.what());
    return failure.result;
  };
  try {
    if (comm_->segment().failed()) throw comm_->segment().failure();
    for (const Put& put : puts_) comm_->windows().run(put);
    if (!transfers_.empty()) {
      struct Active {
        Comm& comm;
        explicit Active(Comm& comm) : comm(comm) { comm.enter(); }
        ~Active() { comm.exit(); }
      } active(*comm_);
      comm_->pointToPoint().run(transfers_);
    }
    for (const SignalWait& wait : waits_) comm_->windows().run(wait);
    if (!collectives_.empty()) {
      comm_->inTurn(ticket_, [this] {
        if (begun_) return comm_->complete(collectives_.front());
        for (const Collective& collective : collectives_) {
          shm::execute(comm_->exchange(), collective, comm_->rank(), comm_->size());
        }
      });
    }
    return ncclSuccess;
  } catch (const NcclError& failure) {
    return failed(failure);
  } catch (const std::bad_alloc&) {
    return failed(NcclError(ncclSystemError, "out of memory"));
  } catch (const std::exception& error) {
    return failed(NcclError(ncclInternalError, error.what()));
  }
}

void Launch::add(Plan plan) {
  for (const cudaStream_t stream : plan.streams()) addUnique(streams_, stream);
  plans_.push_back(std::move(plan));
}

void Launch::absorb(Launch& other) {
  for (Plan& plan : other.plans_) add(std::move(plan));
}

bool Launch::sharesStream(const Plan& plan) const {
  return std::ranges::any_of(plan.streams(), [this](cudaStream_t stream) {
    return std::ranges::find(streams_, stream) != streams_.end();
  });
}

bool Launch::usesCaller() const {
  return std::ranges::find(streams_, nullptr) != streams_.end();
}

bool Launch::captured() {
  if (streams_.size() != 1 || usesCaller()) return false;
  return HostStream::fromHandle(streams_.front())->capture([self = shared_from_this()] {
    auto launch = std::make_shared<Launch>();
    for (const Plan& plan : self->plans_) launch->add(plan.again());
    launch->start();
  });
}

ncclResult_t Launch::start() {
  if (captured()) return ncclSuccess;
  const bool now = streams_.size() == 1 && !usesCaller() && plans_.size() == 1 &&
                   HostStream::fromHandle(streams_.front())->idle();
  for (Plan& plan : plans_) plan.launch(now);
  awaited_ = streams_.size();
  for (const cudaStream_t stream : streams_) {
    if (stream == nullptr) continue;
    HostStream::fromHandle(stream)->enqueue([self = shared_from_this()] { self->comeTo(); });
  }
  return usesCaller() ? comeTo() : ncclSuccess;
}

ncclResult_t Launch::comeTo() {
  std::unique_lock lock(mutex_);
  if (--awaited_ == 0) {
    lock.unlock();
    const ncclResult_t result = executeAll();
    lock.lock();
    result_ = result;
    done_ = true;
    changed_.notify_all();
    return result;
  }
  while (!done_) {
    changed_.wait_for(lock, std::chrono::milliseconds(50));
    // The other streams may never come.
    if (!done_ && awaited_ != 0 && anyFailed()) return ncclRemoteError;
  }
  return result_;
}

bool Launch::anyFailed() const {
  return std::ranges::any_of(
      plans_, [](const Plan& plan) { return plan.comm().segment().failed(); });
}

ncclResult_t Launch::executeAll() {
  std::vector<ncclResult_t> results(plans_.size(), ncclSuccess);
  {
    std::vector<std::jthread> helpers;
    size_t begun = 1;
    try {
      for (; begun < plans_.size(); ++begun) {
        helpers.emplace_back([this, &results, begun] { results[begun] = plans_[begun].execute(); });
      }
    } catch (const std::system_error& error) {
      // Ranks of these plans may need each other, so the plans cannot be executed one after
      // another.
      for (size_t i = begun; i < plans_.size(); ++i) {
        plans_[i].comm().segment().fail(
            NcclError(ncclSystemError, std::string("cannot start a thread: ") + error.what()));
        results[i] = plans_[i].execute();
      }
    }
    results[0] = plans_[0].execute();
  }
  for (const ncclResult_t result : results) {
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

}  // namespace torchcomms_pg::shm
