#include "shm/api/GroupCalls.hpp"

#include <exception>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include "base/NeverDestroyed.hpp"
#include "shm/Host.hpp"
#include "shm/collective/Algorithms.hpp"

namespace torchcomms_pg::shm {
namespace {

struct GroupState {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::string errorText;
  std::vector<IssuedOp> operations;
};

thread_local GroupState group;
thread_local std::string lastError;

// Made when the library is loaded, since later there may be no memory for it.
const auto& outOfMemory = neverDestroyed<NcclError>(ncclSystemError, "out of memory");

// Operations that are executed together: all operations of one group, or a single operation. The
// issuing thread builds and starts the plan, and one thread executes it.
class Plan : public std::enable_shared_from_this<Plan> {
 public:
  // Throws NcclError unless all operations have one communicator and one stream.
  explicit Plan(std::span<IssuedOp> operations);

  // Enqueues the operations on the stream. If the stream records a graph, each replay executes
  // them. If the stream is null, executes them in the calling thread. Returns their result if they
  // have been executed, and else ncclSuccess.
  ncclResult_t start();

 private:
  void add(const Collective& collective) { collectives_.push_back(collective); }
  void add(std::shared_ptr<Transfer> transfer) { transfers_.push_back(std::move(transfer)); }
  void add(Put put) { puts_.push_back(std::move(put)); }
  void add(SignalWait wait) { waits_.push_back(std::move(wait)); }

  // Returns a copy. This plan must not have been launched.
  std::shared_ptr<Plan> again() const;

  // Fixes the plan's place in the order of the communicator's operations. `now` is true if the
  // stream has no earlier operation: then a single small collective publishes this rank's data at
  // once.
  void launch(bool now);

  // Runs the puts, which do not wait, then the transfers together, then the waits for signals, then
  // the collectives in order. Blocks. Returns the result; an error fails the communicator.
  ncclResult_t execute() noexcept;

  std::shared_ptr<Comm> comm_;
  const cudaStream_t stream_;
  std::vector<std::shared_ptr<Transfer>> transfers_;
  std::vector<Put> puts_;
  std::vector<SignalWait> waits_;
  std::vector<Collective> collectives_;
  uint64_t ticket_ = 0;
  bool begun_ = false;
};

Plan::Plan(std::span<IssuedOp> operations)
    : comm_(operations.front().comm), stream_(operations.front().stream) {
  for (IssuedOp& operation : operations) {
    if (operation.comm != comm_ || operation.stream != stream_) {
      throw NcclError(
          ncclInvalidUsage,
          "groupEnd: a group over shared memory has one communicator and one stream");
    }
    std::visit([this](auto& what) { add(std::move(what)); }, operation.what);
  }
}

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

void launch(std::span<IssuedOp> operations) {
  const auto plan = std::make_shared<Plan>(operations);
  if (plan->start() != ncclSuccess) throw operations.front().comm->segment().failure();
}

}  // namespace

void issue(IssuedOp operation) {
  if (const auto* transfer = std::get_if<std::shared_ptr<Transfer>>(&operation.what);
      transfer != nullptr && (*transfer)->done != nullptr) {
    return operation.comm->pointToPoint().runIndependently(*transfer);
  }
  if (group.depth != 0) {
    group.operations.push_back(std::move(operation));
    return;
  }
  if (operation.stream == nullptr) {
    // Runs a put or a wait for signals without a plan, which would allocate memory.
    Comm& comm = *operation.comm;
    if (const auto* put = std::get_if<Put>(&operation.what)) return comm.windows().run(*put);
    if (auto* wait = std::get_if<SignalWait>(&operation.what)) {
      comm.windows().expect(*wait);
      return comm.windows().run(*wait);
    }
  }
  launch({&operation, 1});
}

void groupStart() {
  ++group.depth;
}

void groupEnd() {
  if (group.depth == 0) {
    throw NcclError(ncclInvalidUsage, "groupEnd: there was no groupStart in this thread");
  }
  if (--group.depth != 0) return;
  GroupState ended = std::exchange(group, {});
  if (ended.error != ncclSuccess) throw NcclError(ended.error, ended.errorText);
  if (!ended.operations.empty()) launch(ended.operations);
}

bool groupOpen() {
  return group.depth != 0;
}

void checkNoGroup(const char* operation) {
  if (group.depth != 0) {
    throw NcclError(
        ncclInvalidUsage,
        std::string(operation) +
            ": called inside a group, which over shared memory has operations alone");
  }
}

ncclResult_t reportFailure(ncclResult_t result, const char* text) noexcept {
  try {
    setThreadError(text);
    if (group.depth != 0 && group.error == ncclSuccess) {
      group.error = result;
      group.errorText = text;
    }
  } catch (const std::exception&) {
    // There is no memory for the text.
  }
  return result;
}

const std::string& threadError() {
  return lastError;
}

void setThreadError(const std::string& text) {
  lastError = text;
}

}  // namespace torchcomms_pg::shm
