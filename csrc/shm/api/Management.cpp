#include "shm/api/Management.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <vector>

#include "base/NeverDestroyed.hpp"
#include "shm/api/GroupCalls.hpp"
#include "shm/api/ResultCodes.hpp"
#include "shm/api/Validate.hpp"
#include "shm/segment/MappableMemory.hpp"

namespace torchcomms_pg::shm {
namespace {

// Stores the handle atomically, since another thread may read it while this one waits for the other
// ranks.
void publish(ncclComm_t* made, ncclComm_t handle) {
  std::atomic_ref(*made).store(handle);
}

// Checks what all functions that make a communicator check first.
void checkMade(const char* operation, const char* name, ncclComm_t* made) {
  checkPointer(operation, name, made);
  publish(made, nullptr);
  checkNoGroup(operation);
}

// Makes the communicator. Waits until all ranks have joined if it is blocking, and otherwise
// returns ncclInProgress if ranks have not joined. Sets `*made` before it waits, so that another
// thread can abort the wait; after an error, `*made` is null.
ncclResult_t join(const ncclUniqueId& id, int ranks, int rank, bool blocking, ncclComm_t* made) {
  const std::shared_ptr<Comm> comm = Comm::join(id, ranks, rank, blocking);
  publish(made, addHandle(comm));
  if (!blocking) return comm->allJoined() ? ncclSuccess : ncclInProgress;
  try {
    comm->awaitJoined();
  } catch (const NcclError&) {
    removeHandle(std::atomic_ref(*made).exchange(nullptr));
    comm->abort();
    throw;
  }
  return ncclSuccess;
}

// A rank's arguments to a split.
struct Choice {
  int32_t color;
  int32_t key;
};

// Exchanges every rank's choice over the parent, and then the ids of the new communicators, which
// the rank 0 of each makes.
ncclResult_t split(Comm& parent, const Choice& choice, bool blocking, ncclComm_t* made) {
  struct Member {
    int32_t key;
    int rank;
    auto operator<=>(const Member&) const = default;
  };
  std::vector<Member> members;
  const bool joins = choice.color != NCCL_SPLIT_NOCOLOR;
  const auto id = parent.inTurn(CollectiveKind::split, [&](Exchange& exchange) {
    const auto choices = exchange.gather(choice);
    for (int rank = 0; rank < parent.size(); ++rank) {
      if (choices[rank].color == choice.color) members.push_back({choices[rank].key, rank});
    }
    std::ranges::sort(members);
    const int leader = members.front().rank;
    const bool leads = joins && leader == parent.rank();
    return exchange.gather(leads ? makeUniqueId() : ncclUniqueId{})[leader];
  });
  if (!joins) return ncclSuccess;
  const auto self = std::ranges::find(members, parent.rank(), &Member::rank);
  const auto rank = static_cast<int>(self - members.begin());
  return join(id, static_cast<int>(members.size()), rank, blocking, made);
}

const char* getLastError(ncclComm_t handle) {
  if (handle != nullptr) {
    try {
      const std::shared_ptr<Comm> comm = findHandle(handle, "getLastError");
      if (comm->segment().failed()) setThreadError(comm->segment().failure().what());
    } catch (const std::exception&) {
      // If the communicator has ended or memory is short, returns this thread's own last error.
    }
  }
  return threadError().c_str();
}

// Ends a communicator with `end`, and removes its handle. In a forked child, removes the handle and
// frees nothing: the memory belongs to the parent's rank, and threads that do not exist in the
// child may hold the locks.
ncclResult_t endComm(ncclComm_t handle, const char* operation, void (Comm::*end)()) {
  return guarded([&] {
    const std::shared_ptr<Comm> comm = findHandle(handle, operation);
    if (comm->inOwnProcess()) {
      (*comm.*end)();
    } else {
      neverDestroyed<std::shared_ptr<Comm>>(comm);
    }
    removeHandle(handle);
  });
}

}  // namespace

ncclResult_t shrink(
    Comm& parent, std::span<const int> excluded, ncclComm_t* made, const ncclConfig_t* config,
    int flags, std::chrono::steady_clock::time_point deadline) {
  constexpr const char* kName = "commShrink";
  checkMade(kName, "newcomm", made);
  const bool blocking = checkConfig(kName, config, parent.blocking());
  checkValue(
      kName, "shrinkFlags", flags, flags == NCCL_SHRINK_DEFAULT || flags == NCCL_SHRINK_ABORT,
      "NCCL_SHRINK_DEFAULT or NCCL_SHRINK_ABORT");
  std::vector<bool> gone(parent.size(), false);
  for (const int rank : excluded) {
    checkRank(kName, "excludeRanksList", rank, parent.size());
    if (gone[rank]) {
      invalidArgument(kName, "excludeRanksList names rank " + std::to_string(rank) + " twice");
    }
    gone[rank] = true;
  }
  if (gone[parent.rank()]) {
    invalidArgument(
        kName, "excludeRanksList names this rank, " + std::to_string(parent.rank()) +
                   "; only the ranks that stay call it");
  }
  const auto survivors = parent.segment().ranksWhere([&](int rank) { return !gone[rank]; });
  const uint64_t hash = hashBytes(survivors.data(), survivors.size() * sizeof(int));
  if (flags == NCCL_SHRINK_ABORT) {
    parent.fail(NcclError(
        ncclRemoteError,
        parent.whoAmI() + " shrinks the communicator and has ended its operations"));
  } else if (!parent.revoked()) {
    parent.checkUsable();
  }
  parent.awaitPlans();
  const auto self = std::ranges::find(survivors, parent.rank());
  const auto rank = static_cast<int>(self - survivors.begin());
  std::optional<ncclUniqueId> id;
  if (rank == 0) {
    id = makeUniqueId();
    parent.offerShrink(hash, *id);
  } else {
    id = parent.takeShrinkOffer(survivors.front(), hash, deadline);
  }
  if (!id) return ncclInProgress;
  return join(*id, static_cast<int>(survivors.size()), rank, blocking, made);
}

// The lambdas' parameters have the types that nccl.h gives to the table's entries.
void addManagement(NcclApi& t) {
  t.getVersion = [](auto version) {
    return guarded([&] {
      checkPointer("getVersion", "version", version);
      *version = NCCL_VERSION_CODE;
    });
  };
  t.getErrorString = [](auto result) {
    constexpr const char* kTexts[] = {
        "no error",
        "unhandled accelerator error",
        "system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote process exited, left or failed",
        "operation in progress",
        "timed out"};
    const auto index = static_cast<size_t>(result);
    return index < std::size(kTexts) ? kTexts[index] : "unknown result code";
  };
  t.getLastError = getLastError;

  t.getUniqueId = [](auto id) {
    return guarded([&] {
      checkPointer("getUniqueId", "uniqueId", id);
      *id = makeUniqueId();
    });
  };
  t.commInitRankConfig = [](auto made, auto ranks, auto id, auto rank, auto config) {
    return guarded([&] {
      constexpr const char* kName = "commInitRank";
      checkMade(kName, "comm", made);
      checkRange(kName, "nranks", ranks, 1, kMaxRanks);
      checkRank(kName, "rank", rank, ranks);
      return join(id, ranks, rank, checkConfig(kName, config, true), made);
    });
  };
  t.commSplit = [](auto handle, auto color, auto key, auto made, auto config) {
    constexpr const char* kName = "commSplit";
    return withComm(handle, kName, [&](const auto& comm) {
      checkMade(kName, "newcomm", made);
      checkValue(
          kName, "color", color, color >= 0 || color == NCCL_SPLIT_NOCOLOR,
          "a number from 0 or NCCL_SPLIT_NOCOLOR");
      const bool blocking = checkConfig(kName, config, comm->blocking());
      comm->checkUsable();
      return split(*comm, {color, key}, blocking, made);
    });
  };
  t.commShrink = [](auto handle, auto excluded, auto count, auto made, auto config, auto flags) {
    constexpr const char* kName = "commShrink";
    return withComm(handle, kName, [&](const auto& comm) {
      checkRange(kName, "excludeRanksCount", count, 1, comm->size() - 1);
      checkPointer(kName, "excludeRanksList", excluded);
      constexpr auto kNever = std::chrono::steady_clock::time_point::max();
      return shrink(*comm, {excluded, static_cast<size_t>(count)}, made, config, flags, kNever);
    });
  };

  t.commFinalize = [](auto handle) {
    return withComm(handle, "commFinalize", [](const auto& comm) { comm->finalize(); });
  };
  t.commDestroy = [](auto handle) { return endComm(handle, "commDestroy", &Comm::destroy); };
  t.commAbort = [](auto handle) { return endComm(handle, "commAbort", &Comm::abort); };
  t.commRevoke = [](auto handle, auto flags) {
    constexpr const char* kName = "commRevoke";
    return withComm(handle, kName, [&](const auto& comm) {
      checkValue(kName, "revokeFlags", flags, flags == NCCL_REVOKE_DEFAULT, "NCCL_REVOKE_DEFAULT");
      comm->revoke();
    });
  };

  t.commGetAsyncError = [](auto handle, auto error) {
    return withComm(handle, "commGetAsyncError", [&](const auto& comm) {
      checkPointer("commGetAsyncError", "asyncError", error);
      *error = comm->asyncError();
    });
  };
  t.commCount = [](auto handle, auto count) {
    return withComm(handle, "commCount", [&](const auto& comm) {
      checkPointer("commCount", "count", count);
      *count = comm->size();
    });
  };
  t.commUserRank = [](auto handle, auto rank) {
    return withComm(handle, "commUserRank", [&](const auto& comm) {
      checkPointer("commUserRank", "rank", rank);
      *rank = comm->rank();
    });
  };

  t.redOpCreatePreMulSum = [](auto op, auto scalar, auto type, auto residence, auto handle) {
    constexpr const char* kName = "redOpCreatePreMulSum";
    return withComm(handle, kName, [&](const auto& comm) {
      checkPointer(kName, "op", op);
      checkPointer(kName, "scalar", scalar);
      checkType(kName, type);
      checkValue(
          kName, "residence", residence,
          residence == ncclScalarDevice || residence == ncclScalarHostImmediate,
          "ncclScalarDevice or ncclScalarHostImmediate");
      *op = comm->operators().createPreMulSum(scalar, type, residence);
    });
  };
  t.redOpDestroy = [](auto op, auto handle) {
    return withComm(
        handle, "redOpDestroy", [&](const auto& comm) { comm->operators().destroy(op); });
  };

  t.memAlloc = [](auto pointer, auto size) {
    return guarded([&] {
      checkPointer("memAlloc", "ptr", pointer);
      *pointer = nullptr;
      if (size != 0) *pointer = allocateMemory(size);
    });
  };
  t.memFree = [](auto pointer) {
    return guarded([&] {
      if (pointer != nullptr) freeMemory(pointer);
    });
  };
  t.commRegister = [](auto handle, auto buffer, auto size, auto registration) {
    return withComm(handle, "commRegister", [&](const auto& comm) {
      checkPointer("commRegister", "handle", registration);
      checkBuffer("commRegister", "buff", buffer, size);
      *registration = comm->registerBuffer();
    });
  };
  t.commDeregister = [](auto handle, auto registration) {
    return withComm(
        handle, "commDeregister", [&](const auto& comm) { comm->deregisterBuffer(registration); });
  };
}

}  // namespace torchcomms_pg::shm
