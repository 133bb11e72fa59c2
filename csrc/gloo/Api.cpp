#include "gloo/Api.hpp"

#include <utility>
#include <variant>

#include "host/HostStream.hpp"
#include "nccl/ElementSize.hpp"
#include "shm/api/Api.hpp"
#include "shm/api/Group.hpp"
#include "shm/api/Handles.hpp"
#include "shm/api/ResultCodes.hpp"

namespace torchcomms_pg::gloo {

namespace {

using shm::guarded;
using CommPtr = std::shared_ptr<Comm>;

// One call into the table.
struct Task {
  CommPtr comm;
  cudaStream_t stream;
  std::variant<host::Collective, Messages::Issued> what;
};

// An all-to-all, issued as one send and one receive for each rank.
struct Exchange {
  std::vector<Part> sends;
  std::vector<Part> receives;
  ncclDataType_t type = ncclInt8;
  Comm::Place place;
  size_t parts = 0;

  bool complete() const { return parts == sends.size() + receives.size(); }
};

// The operations of one launch. Messages proceed together, also while the collectives and then the
// exchanges run one after another.
struct Batch {
  std::vector<std::pair<host::Collective, Comm::Place>> collectives;
  std::vector<Messages::Issued> messages;
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
  const auto requests = comm.messages().post(batch.messages, together);
  try {
    for (const auto& [collective, place] : batch.collectives) {
      comm.run(collective, place);
    }
    for (const auto& exchange : batch.exchanges) {
      comm.exchange(exchange.sends, exchange.receives, exchange.type, exchange.place);
    }
  } catch (const std::exception& error) {
    comm.messages().withdraw(requests, error);
    throw;
  }
  if (!requests.empty()) {
    comm.messages().complete(requests);
  }
}

ncclResult_t launch(std::vector<Task> tasks) {
  const auto comm = tasks.front().comm;
  const auto stream = tasks.front().stream;
  comm->fault().check();
  std::vector<Messages::Issued> later;  // messages that are independent of streams
  Batch now;
  for (const auto& task : tasks) {
    if (task.comm != comm || task.stream != stream) {
      throw host::NcclError(
          ncclInvalidUsage, "groupEnd: a group over Gloo has one communicator and one stream");
    }
    // Assigns places now, in the order of issue, which is the same on all ranks.
    if (const auto* collective = std::get_if<host::Collective>(&task.what)) {
      now.collectives.emplace_back(*collective, comm->nextPlace());
      continue;
    }
    const auto& issued = std::get<Messages::Issued>(task.what);
    const auto& [sending, message] = issued;
    if (message.done != nullptr) {
      later.push_back(issued);
    } else if (message.tag >= 0) {
      now.messages.push_back(issued);
    } else {
      // Belongs to an exchange; exchanges are issued one after another.
      if (now.exchanges.empty() || now.exchanges.back().complete()) {
        const std::vector<Part> none(comm->topology().size);
        now.exchanges.push_back({none, none, message.type, {}});
      }
      auto& exchange = now.exchanges.back();
      auto& parts = sending ? exchange.sends : exchange.receives;
      parts[message.peer] = {message.buffer, message.count * elementSize(message.type)};
      ++exchange.parts;
    }
  }
  for (auto& exchange : now.exchanges) {
    exchange.place = comm->nextPlace();
  }
  for (const auto& issued : later) {
    const bool alone = comm->messages().isInside(issued.message);
    if (!alone) {
      comm->prepareLater();
    }
    const auto requests = comm->messages().post({issued}, /*together=*/false);
    if (!alone) {
      comm->completeLater(requests.front());
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
      comm->fault().fail({ncclInternalError, error.what()});
    }
  });
  return ncclSuccess;
}

ncclResult_t add(Task task) {
  if (group.depth > 0) {
    group.tasks.push_back(std::move(task));
    return ncclSuccess;
  }
  std::vector<Task> tasks;
  tasks.push_back(std::move(task));
  return launch(std::move(tasks));
}

ncclResult_t collective(const Collective& c, ncclComm_t handle, cudaStream_t stream) {
  return guarded([&] { return add({from(handle), stream, c}); });
}

ncclResult_t message(bool sending, const Message& message, ncclComm_t handle, cudaStream_t stream) {
  return guarded([&] { return add({from(handle), stream, Messages::Issued{sending, message}}); });
}

ncclResult_t commFinalize(ncclComm_t) {
  return ncclSuccess;  // the Communicator has drained it
}

ncclResult_t commDestroy(ncclComm_t handle) {
  return guarded([&] {
    const std::unique_ptr<CommPtr> comm(&from(handle));
    (*comm)->close();
    return ncclSuccess;
  });
}

ncclResult_t commSplit(
    ncclComm_t handle, int color, int key, ncclComm_t* child, ncclConfig_t* /*config*/) {
  return guarded([&] {
    const auto& comm = from(handle);
    const auto made = comm->split(color, key, comm->nextPlace());
    *child = made.comm ? handleOf(made.comm) : made.inside;
    return ncclSuccess;
  });
}

const char* getLastError(ncclComm_t handle) {
  if (handle != nullptr) {
    if (const auto failure = from(handle)->fault().known()) {
      shm::setThreadError(failure->what());
    }
  }
  return shm::threadError().c_str();
}

ncclResult_t groupEnd() {
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

NcclApi fill() {
  NcclApi t;
  t.getVersion = shm::api().getVersion;
  t.getErrorString = shm::api().getErrorString;
  t.getLastError = getLastError;
  t.commFinalize = commFinalize;
  t.commDestroy = commDestroy;
  t.commAbort = commDestroy;
  t.commSplit = commSplit;
  t.commGetAsyncError = [](ncclComm_t comm, ncclResult_t* state) {
    const auto failure = from(comm)->fault().known();
    *state = failure ? failure->result : ncclSuccess;
    return ncclSuccess;
  };
  t.probe = [](ncclComm_t comm) { return from(comm)->probe(); };
  t.ring = [](ncclComm_t comm, uint64_t times) { return from(comm)->ring(times); };
  t.commCount = [](const ncclComm_t comm, int* count) {
    *count = from(comm)->topology().size;
    return ncclSuccess;
  };
  t.commUserRank = [](const ncclComm_t comm, int* rank) {
    *rank = from(comm)->topology().rank;
    return ncclSuccess;
  };
  t.collective = collective;
  t.sendTagged = [](const Message& sent, ncclComm_t comm, cudaStream_t stream) {
    return message(true, sent, comm, stream);
  };
  t.recvTagged = [](const Message& received, ncclComm_t comm, cudaStream_t stream) {
    return message(false, received, comm, stream);
  };
  t.groupStart = [] {
    ++group.depth;
    return ncclSuccess;
  };
  t.groupEnd = groupEnd;
  t.libraryOf = [](ncclComm_t child) -> const NcclApi& {
    return shm::isHandle(child) ? shm::api() : api();
  };
  t.absenceIsCertain = false;
  t.missingRanks = [](ncclComm_t comm) { return from(comm)->missingRanks(); };
  t.fail = [](ncclComm_t comm,
              ncclResult_t result,
              const std::string& reason,
              const std::vector<int>& ranks) {
    from(comm)->fault().fail({result, reason, ranks});
    return ncclSuccess;
  };
  return t;
}

}  // namespace

const NcclApi& api() {
  static const NcclApi table = fill();
  return table;
}

ncclComm_t newComm(Members members, Connected connected, const std::function<void()>& look) {
  return handleOf(Comm::make(std::move(members), connected, look));
}

}  // namespace torchcomms_pg::gloo
