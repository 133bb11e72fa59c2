#include "shm/collective/Plan.hpp"

#include <exception>
#include <new>

#include "base/NeverDestroyed.hpp"
#include "shm/Host.hpp"
#include "shm/collective/Algorithms.hpp"

namespace torchcomms_pg::shm {
namespace {

// Made when the library is loaded, since later there may be no memory for it.
const auto& outOfMemory = neverDestroyed<NcclError>(ncclSystemError, "out of memory");

}  // namespace

std::shared_ptr<Plan> Plan::again() const {
  auto other = std::make_shared<Plan>(*this);
  for (auto& transfer : other->transfers_) transfer = transfer->again();
  return other;
}

ncclResult_t Plan::start() {
  if (stream_ == nullptr) {
    launch(/*now=*/false);
    return execute();
  }
  HostStream& stream = *HostStream::fromHandle(stream_);
  const auto self = shared_from_this();
  if (stream.capture([self] { self->again()->start(); })) return ncclSuccess;
  launch(/*now=*/stream.idle());
  try {
    stream.enqueue([self, &stream] {
      if (self->execute() != ncclSuccess) stream.failed();
    });
  } catch (const std::exception& error) {
    // Later plans wait for this plan, which the stream will not execute. So the communicator fails.
    comm_->fail(NcclError(ncclSystemError, error.what(), {comm_->rank()}));
    return execute();
  }
  return ncclSuccess;
}

void Plan::launch(bool now) {
  for (const auto& transfer : transfers_) comm_->pointToPoint().add(transfer);
  for (SignalWait& wait : waits_) comm_->windows().expect(wait);
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
    try {
      comm_->fail(cause);
      return comm_->segment().failure().result;
    } catch (const std::bad_alloc&) {
      return cause.result;  // fail() has recorded a failure without allocating
    }
  };
  try {
    if (comm_->segment().failed()) throw comm_->segment().failure();
    for (const Put& put : puts_) comm_->windows().run(put);
    if (!transfers_.empty()) {
      const Comm::Active active(*comm_);
      comm_->pointToPoint().run(transfers_);
    }
    for (const SignalWait& wait : waits_) comm_->windows().run(wait);
    if (!collectives_.empty()) {
      const Comm::Turn turn(*comm_, ticket_);
      if (begun_) {
        comm_->complete(collectives_.front());
      } else {
        for (const Collective& collective : collectives_) {
          shm::execute(comm_->exchange(), collective, comm_->rank(), comm_->size());
        }
      }
    }
    return ncclSuccess;
  } catch (const NcclError& failure) {
    return failed(failure);
  } catch (const std::bad_alloc&) {
    return failed(outOfMemory);
  } catch (const std::exception& error) {
    return failed(NcclError(ncclInternalError, error.what()));
  }
}

}  // namespace torchcomms_pg::shm
