#include "gloo/Api.hpp"

#include <utility>
#include <variant>

#include "base/NeverDestroyed.hpp"
#include "host/HostStream.hpp"
#include "shm/api/Api.hpp"
#include "shm/api/GroupCalls.hpp"
#include "shm/api/Handles.hpp"
#include "shm/api/ResultCodes.hpp"

namespace torchcomms_pg::gloo {

namespace {

using shm::guarded;
using CommPtr = std::shared_ptr<Comm>;

// One call of the library.
struct Task {
  CommPtr comm;
  cudaStream_t stream;
  std::variant<Collective, Message> what;
};

// An all-to-all, issued as one send and one receive for each rank.
struct Exchange {
  std::vector<Part> sends;
  std::vector<Part> receives;
  ncclDataType_t type = ncclInt8;
  uint64_t place = 0;
  size_t parts = 0;

  bool complete() const { return parts == sends.size() + receives.size(); }
};

// The operations of one launch. All messages proceed together, while the collectives and then the
// exchanges run one after another.
struct Batch {
  std::vector<std::pair<Collective, uint64_t>> collectives;
  std::vector<Message> messages;
  std::vector<Exchange> exchanges;
};

struct GroupState {
  int depth = 0;
  std::vector<Task> tasks;
};

thread_local GroupState group;

CommPtr& from(ncclComm_t handle) {
  return *reinterpret_cast<CommPtr*>(handle);
}

ncclComm_t handleOf(CommPtr comm) {
  return reinterpret_cast<ncclComm_t>(new CommPtr(std::move(comm)));
}

void run(Comm& comm, const Batch& batch) {
  const bool together = batch.collectives.empty() && batch.exchanges.empty();
  const auto transfers = comm.messages().post(batch.messages, together);
  try {
    for (const auto& [collective, place] : batch.collectives) {
      comm.run(collective, place);
    }
    for (const auto& exchange : batch.exchanges) {
      comm.exchange(exchange.sends, exchange.receives, exchange.type, exchange.place);
    }
  } catch (const std::exception& error) {
    comm.messages().withdraw(transfers, error);
    throw;
  }
  if (!transfers.empty()) {
    comm.messages().complete(transfers);
  }
}

ncclResult_t launch(std::vector<Task> tasks) {
  const auto comm = tasks.front().comm;
  const auto stream = tasks.front().stream;
  comm->groupFailure().check();
  std::vector<Message> later;  // messages that are independent of streams
  Batch now;
  for (const auto& task : tasks) {
    if (task.comm != comm || task.stream != stream) {
      throw host::NcclError(
          ncclInvalidUsage, "groupEnd: a group over Gloo has one communicator and one stream");
    }
    // Assigns places now, in the order of issue, which is the same on all ranks.
    if (const auto* collective = std::get_if<Collective>(&task.what)) {
      now.collectives.emplace_back(*collective, comm->nextPlace());
      continue;
    }
    const auto& message = std::get<Message>(task.what);
    if (message.done != nullptr) {
      later.push_back(message);
    } else if (message.tag >= 0) {
      now.messages.push_back(message);
    } else {
      // The message belongs to an exchange; exchanges are issued one after another.
      if (now.exchanges.empty() || now.exchanges.back().complete()) {
        const std::vector<Part> none(comm->topology().size);
        now.exchanges.push_back({none, none, message.type, {}});
      }
      auto& exchange = now.exchanges.back();
      auto& parts = message.sending ? exchange.sends : exchange.receives;
      parts[message.peer] = {message.buffer, message.count * elementSize(message.type)};
      ++exchange.parts;
    }
  }
  for (auto& exchange : now.exchanges) {
    exchange.place = comm->nextPlace();
  }
  for (const auto& message : later) {
    const bool alone = comm->messages().isInside(message);
    if (!alone) {
      comm->prepareLater();
    }
    const auto transfers = comm->messages().post({message}, /*together=*/false);
    if (!alone) {
      comm->completeLater(transfers.front());
    }
  }
  if (now.collectives.empty() && now.messages.empty() && now.exchanges.empty()) {
    return ncclSuccess;
  }
  if (stream == nullptr) {
    run(*comm, now);
    return ncclSuccess;
  }
  host::HostStream::fromHandle(stream)->enqueue([comm, now = std::move(now)] {
    try {
      run(*comm, now);
    } catch (const host::NcclError&) {
      // The communicator has failed; commGetAsyncError reports it.
    } catch (const std::exception& error) {
      comm->groupFailure().fail({ncclInternalError, error.what()});
    }
  });
  return ncclSuccess;
}

ncclResult_t add(Task task) {
  group.tasks.push_back(std::move(task));
  return group.depth > 0 ? ncclSuccess : launch(std::exchange(group.tasks, {}));
}

class SeveralHosts final : public Library {
 public:
  SeveralHosts()
      : Library(
            {}, {Feature::barrier, Feature::tags, Feature::fail, Feature::missingRanks,
                 Feature::ring, Feature::probe}) {}

  int version() const override { return shm::library().version(); }

  const char* getErrorString(ncclResult_t result) const override {
    return shm::library().getErrorString(result);
  }
  const char* getLastError(ncclComm_t handle) const override {
    if (handle != nullptr) {
      if (const auto failure = from(handle)->groupFailure().known()) {
        shm::setThreadError(failure->what());
      }
    }
    return shm::threadError().c_str();
  }

  ncclResult_t commFinalize(ncclComm_t) const override {
    return ncclSuccess;  // the Communicator has waited for its operations
  }
  ncclResult_t commDestroy(ncclComm_t handle) const override {
    return guarded([&] {
      const std::unique_ptr<CommPtr> comm(&from(handle));
      (*comm)->close();
      return ncclSuccess;
    });
  }
  ncclResult_t commAbort(ncclComm_t handle) const override { return commDestroy(handle); }
  ncclResult_t commSplit(
      ncclComm_t handle, int color, int key, ncclComm_t* child,
      ncclConfig_t* /*config*/) const override {
    return guarded([&] {
      const auto& comm = from(handle);
      const auto made = comm->split(color, key, comm->nextPlace());
      *child = made.comm ? handleOf(made.comm) : made.inside;
      return ncclSuccess;
    });
  }
  const Library& libraryOf(ncclComm_t child) const override {
    return shm::isHandle(child) ? shm::library() : *this;
  }
  ncclResult_t commCount(ncclComm_t handle, int* count) const override {
    *count = from(handle)->topology().size;
    return ncclSuccess;
  }
  ncclResult_t commUserRank(ncclComm_t handle, int* rank) const override {
    *rank = from(handle)->topology().rank;
    return ncclSuccess;
  }

  ncclResult_t commGetAsyncError(ncclComm_t handle, ncclResult_t* error) const override {
    const auto failure = from(handle)->groupFailure().known();
    *error = failure ? failure->result : ncclSuccess;
    return ncclSuccess;
  }
  ncclResult_t fail(
      ncclComm_t handle, ncclResult_t result, const std::string& reason,
      const std::vector<int>& ranks) const override {
    from(handle)->groupFailure().fail({result, reason, ranks});
    return ncclSuccess;
  }
  std::vector<int> missingRanks(ncclComm_t handle) const override {
    return from(handle)->missingRanks();
  }
  bool absenceIsCertain() const override { return false; }
  std::function<void()> probe(ncclComm_t handle, Announcements by) const override {
    return from(handle)->probe(std::move(by));
  }
  uint64_t ring(ncclComm_t handle, uint64_t times) const override {
    return from(handle)->ring(times);
  }

  ncclResult_t run(const Collective& c, ncclComm_t handle, cudaStream_t stream) const override {
    return guarded([&] { return add({from(handle), stream, c}); });
  }
  ncclResult_t run(const Message& message, ncclComm_t handle, cudaStream_t stream) const override {
    return guarded([&] { return add({from(handle), stream, message}); });
  }
  ncclResult_t groupStart() const override {
    ++group.depth;
    return ncclSuccess;
  }
  ncclResult_t groupEnd() const override {
    return guarded([] {
      if (group.depth == 0) {
        throw host::NcclError(ncclInvalidUsage, "groupEnd: there was no groupStart in this thread");
      }
      if (--group.depth > 0) {
        return ncclSuccess;
      }
      auto tasks = std::exchange(group.tasks, {});
      return tasks.empty() ? ncclSuccess : launch(std::move(tasks));
    });
  }
};

}  // namespace

const Library& library() {
  static const auto& instance = neverDestroyed<SeveralHosts>();
  return instance;
}

ncclComm_t newComm(Members members, Connected connected, const std::function<void()>& look) {
  return handleOf(Comm::make(std::move(members), connected, look));
}

}  // namespace torchcomms_pg::gloo
