#include "gloo/Api.hpp"

#include <utility>

#include "shm/Api.hpp"
#include "shm/HostStream.hpp"
#include "shm/Reduce.hpp"

namespace torchcomms_pg::gloo {

namespace {

using CommPtr = std::shared_ptr<Comm>;
using shm::CollectiveKind;

// One call into the table: a collective, or a message (`collective.kind` is then not looked at).
struct Task {
  CommPtr comm;
  cudaStream_t stream = nullptr;
  shm::Collective collective;
  bool isMessage = false;
  bool sending = false;
  Message message;
  int tag = 0;
};

struct GroupState {
  int depth = 0;
  std::vector<Task> tasks;
};

thread_local GroupState group;
thread_local std::string lastError;

template <class Body>
ncclResult_t guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const shm::Failure& failure) {
    lastError = failure.what();
    return failure.result;
  } catch (const std::exception& error) {
    lastError = error.what();
    return ncclInternalError;
  }
}

CommPtr& from(ncclComm_t handle) {
  return *reinterpret_cast<CommPtr*>(handle);
}

ncclComm_t handleOf(CommPtr comm) {
  return reinterpret_cast<ncclComm_t>(new CommPtr(std::move(comm)));
}

// Messages are under way together, also while the collectives run one after another.
void run(const std::vector<Task>& tasks) {
  std::vector<std::shared_ptr<Parcel>> parcels;
  for (const auto& task : tasks) {
    if (task.isMessage) {
      parcels.push_back(task.comm->post(task.sending, task.message, task.tag));
    }
  }
  for (const auto& task : tasks) {
    if (!task.isMessage) {
      task.comm->run(task.collective, task.tag);
    }
  }
  for (const auto& parcel : parcels) {
    // Tags above those of users are an exchange's, which is a collective.
    tasks.front().comm->link().complete(*parcel, parcel->tag >= Link::kTagLimit);
  }
}

ncclResult_t launch(std::vector<Task> tasks) {
  const auto comm = tasks.front().comm;
  const auto stream = tasks.front().stream;
  comm->link().checkUsable();
  int exchange = -1;
  std::vector<Task> later;  // messages that no stream orders
  std::vector<Task> now;
  for (auto& task : tasks) {
    if (task.comm != comm || task.stream != stream) {
      throw shm::Failure(
          ncclInvalidUsage, "groupEnd: a group over Gloo has one communicator and one stream");
    }
    // Tags are given out here, in the order in which all ranks issue.
    if (!task.isMessage) {
      task.tag = comm->link().nextCollectiveTag();
    } else if (task.message.tag >= 0) {
      task.tag = task.message.tag;
    } else {
      exchange = exchange < 0 ? comm->link().nextCollectiveTag() : exchange;
      task.tag = exchange;
    }
    (task.message.done != nullptr ? later : now).push_back(std::move(task));
  }
  for (const auto& task : later) {
    comm->prepareLater();
    comm->completeLater(comm->post(task.sending, task.message, task.tag), task.message);
  }
  if (now.empty()) {
    return ncclSuccess;
  }
  if (stream == nullptr) {
    comm->runWatched([&] { run(now); });
    return ncclSuccess;
  }
  shm::HostStream::fromHandle(stream)->enqueue([comm, now = std::move(now)] {
    try {
      comm->runWatched([&] { run(now); });  // a caller that waits may help the stream's thread
    } catch (const shm::Failure&) {
      // The communicator has failed, which commGetAsyncError tells.
    } catch (const std::exception& error) {
      comm->link().fail(ncclInternalError, error.what(), {});
    }
  });
  return ncclSuccess;
}

ncclResult_t add(Task task) {
  return guarded([&] {
    if (group.depth > 0) {
      group.tasks.push_back(std::move(task));
      return ncclSuccess;
    }
    std::vector<Task> tasks;
    tasks.push_back(std::move(task));
    return launch(std::move(tasks));
  });
}

ncclResult_t collective(shm::Collective c, ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
  Task task{.comm = from(handle), .stream = stream, .collective = c, .message = {}};
  task.collective.op = task.comm->resolveOperator(op);
  return add(std::move(task));
}

ncclResult_t message(bool sending, const Message& message, ncclComm_t handle, cudaStream_t stream) {
  if (message.tag >= Link::kTagLimit) {
    lastError = "tag " + std::to_string(message.tag) + " is too large for Gloo, wanted below " +
                std::to_string(Link::kTagLimit);
    return ncclInvalidArgument;
  }
  return add(
      {.comm = from(handle),
       .stream = stream,
       .collective = {},
       .isMessage = true,
       .sending = sending,
       .message = message});
}

ncclResult_t commFinalize(ncclComm_t) {
  return ncclSuccess;  // the Communicator has drained it
}

ncclResult_t commDestroy(ncclComm_t handle) {
  return guarded([&] {
    const std::unique_ptr<CommPtr> comm(&from(handle));
    (*comm)->link().close();
    return ncclSuccess;
  });
}

ncclResult_t commSplit(
    ncclComm_t handle, int color, int key, ncclComm_t* child, ncclConfig_t* /*config*/) {
  return guarded([&] {
    const auto& comm = from(handle);
    std::shared_ptr<Comm> made;
    const int tag = comm->link().nextCollectiveTag();
    comm->runWatched([&] { made = comm->split(color, key, tag); });
    *child = made ? handleOf(made) : nullptr;
    return ncclSuccess;
  });
}

const char* getLastError(ncclComm_t handle) {
  if (handle != nullptr) {
    if (const auto failure = from(handle)->link().failure()) {
      lastError = failure->what();
    }
  }
  return lastError.c_str();
}

ncclResult_t redOpCreatePreMulSum(
    ncclRedOp_t* op,
    void* scalar,
    ncclDataType_t type,
    ncclScalarResidence_t residence,
    ncclComm_t handle) {
  return guarded([&] {
    shm::Operator created{.reduction = ncclSum, .scaled = true};
    if (residence == ncclScalarDevice) {
      created.scalarAddress = scalar;
    } else {
      shm::copy(created.scalar.data(), scalar, elementSize(type));
    }
    *op = from(handle)->createOperator(created);
    return ncclSuccess;
  });
}

ncclResult_t groupEnd() {
  return guarded([] {
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
    const auto failure = from(comm)->link().failure();
    *state = failure ? failure->result : ncclSuccess;
    return ncclSuccess;
  };
  t.probe = [](ncclComm_t comm) { return from(comm)->link().probe(); };
  t.commCount = [](const ncclComm_t comm, int* count) {
    *count = from(comm)->link().size();
    return ncclSuccess;
  };
  t.commUserRank = [](const ncclComm_t comm, int* rank) {
    *rank = from(comm)->link().rank();
    return ncclSuccess;
  };
  t.redOpCreatePreMulSum = redOpCreatePreMulSum;
  t.redOpDestroy = [](ncclRedOp_t op, ncclComm_t comm) {
    from(comm)->destroyOperator(op);
    return ncclSuccess;
  };
  t.allReduce = [](const void* in,
                   void* out,
                   size_t count,
                   ncclDataType_t type,
                   ncclRedOp_t op,
                   ncclComm_t comm,
                   cudaStream_t stream) {
    return collective({CollectiveKind::allReduce, in, out, count, type, {}, 0}, op, comm, stream);
  };
  t.reduceScatter = [](const void* in,
                       void* out,
                       size_t count,
                       ncclDataType_t type,
                       ncclRedOp_t op,
                       ncclComm_t comm,
                       cudaStream_t stream) {
    return collective(
        {CollectiveKind::reduceScatter, in, out, count, type, {}, 0}, op, comm, stream);
  };
  t.reduce = [](const void* in,
                void* out,
                size_t count,
                ncclDataType_t type,
                ncclRedOp_t op,
                int root,
                ncclComm_t comm,
                cudaStream_t stream) {
    return collective({CollectiveKind::reduce, in, out, count, type, {}, root}, op, comm, stream);
  };
  t.allGather = [](const void* in,
                   void* out,
                   size_t count,
                   ncclDataType_t type,
                   ncclComm_t comm,
                   cudaStream_t stream) {
    return collective(
        {CollectiveKind::allGather, in, out, count, type, {}, 0}, ncclSum, comm, stream);
  };
  t.allToAll = [](const void* in,
                  void* out,
                  size_t count,
                  ncclDataType_t type,
                  ncclComm_t comm,
                  cudaStream_t stream) {
    return collective(
        {CollectiveKind::allToAll, in, out, count, type, {}, 0}, ncclSum, comm, stream);
  };
  t.broadcast = [](const void* in,
                   void* out,
                   size_t count,
                   ncclDataType_t type,
                   int root,
                   ncclComm_t comm,
                   cudaStream_t stream) {
    return collective(
        {CollectiveKind::broadcast, in, out, count, type, {}, root}, ncclSum, comm, stream);
  };
  t.gather = [](const void* in,
                void* out,
                size_t count,
                ncclDataType_t type,
                int root,
                ncclComm_t comm,
                cudaStream_t stream) {
    return collective(
        {CollectiveKind::gather, in, out, count, type, {}, root}, ncclSum, comm, stream);
  };
  t.scatter = [](const void* in,
                 void* out,
                 size_t count,
                 ncclDataType_t type,
                 int root,
                 ncclComm_t comm,
                 cudaStream_t stream) {
    return collective(
        {CollectiveKind::scatter, in, out, count, type, {}, root}, ncclSum, comm, stream);
  };
  t.barrier = [](ncclComm_t comm, cudaStream_t stream) {
    return collective(
        {CollectiveKind::barrier, nullptr, nullptr, 0, ncclInt8, {}, 0}, ncclSum, comm, stream);
  };
  t.send = [](const void* buffer,
              size_t count,
              ncclDataType_t type,
              int peer,
              ncclComm_t comm,
              cudaStream_t stream) {
    return message(true, {const_cast<void*>(buffer), count, type, peer}, comm, stream);
  };
  t.recv = [](void* buffer,
              size_t count,
              ncclDataType_t type,
              int peer,
              ncclComm_t comm,
              cudaStream_t stream) {
    return message(false, {buffer, count, type, peer}, comm, stream);
  };
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
  t.absentRanks = [](ncclComm_t comm) { return from(comm)->link().absentRanks(); };
  t.fail = [](ncclComm_t comm,
              ncclResult_t result,
              const std::string& reason,
              const std::vector<int>& ranks) {
    from(comm)->link().fail(result, reason, ranks);
    return ncclSuccess;
  };
  return t;
}

}  // namespace

const NcclApi& api() {
  static const NcclApi table = fill();
  return table;
}

ncclComm_t newComm(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    Connect connect,
    Connected connected) {
  return handleOf(std::make_shared<Comm>(store, rank, size, std::move(connect), connected));
}

}  // namespace torchcomms_pg::gloo
