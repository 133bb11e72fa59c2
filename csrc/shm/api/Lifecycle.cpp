#include "shm/api/Lifecycle.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "shm/Host.hpp"
#include "shm/api/GroupCalls.hpp"
#include "shm/api/Handles.hpp"
#include "shm/api/Validate.hpp"

namespace torchcomms_pg::shm {
namespace {

// Stores the handle atomically, since another thread may read it while this one waits for the other
// ranks.
void publish(ncclComm_t* made, ncclComm_t handle) {
  std::atomic_ref(*made).store(handle);
}

void discard(const std::shared_ptr<Comm>& comm, ncclComm_t* made) {
  removeHandle(std::atomic_ref(*made).exchange(nullptr));
  comm->abort();
}

// Waits until all ranks have joined. If the communicator is not blocking, returns at once, with
// ncclInProgress if ranks have not joined.
ncclResult_t complete(const std::shared_ptr<Comm>& comm, ncclComm_t* made) {
  if (!comm->blocking()) return comm->allJoined() ? ncclSuccess : ncclInProgress;
  try {
    comm->awaitJoined();
  } catch (const NcclError&) {
    discard(comm, made);
    throw;
  }
  return ncclSuccess;
}

ncclResult_t joinAndComplete(
    const ncclUniqueId& id, int ranks, int rank, bool blocking, ncclComm_t* made) {
  const std::shared_ptr<Comm> comm = Comm::join(id, ranks, rank, blocking);
  publish(made, addHandle(comm));
  return complete(comm, made);
}

// A rank's arguments to a split.
struct Choice {
  int32_t color;
  int32_t key;
};

struct Place {
  ncclUniqueId id;
  int ranks;
  int rank;
};

// Exchanges every rank's choice over the parent, and then the ids of the new communicators, which
// the rank 0 of each makes. Returns nullopt if this rank chose NCCL_SPLIT_NOCOLOR.
std::optional<Place> rendezvousForSplit(Comm& parent, Choice choice) {
  Exchange& exchange = parent.exchange();
  Collective rendezvous;
  rendezvous.kind = CollectiveKind::split;
  exchange.begin(signatureOf(rendezvous));
  std::memcpy(exchange.open(), &choice, sizeof choice);
  exchange.publish();
  struct Member {
    int32_t key;
    int rank;
    auto operator<=>(const Member&) const = default;
  };
  std::vector<Member> members;
  for (int rank = 0; rank < parent.size(); ++rank) {
    Choice theirs = choice;
    if (rank != parent.rank()) std::memcpy(&theirs, exchange.read(rank), sizeof theirs);
    if (theirs.color == choice.color) members.push_back({theirs.key, rank});
  }
  exchange.close();

  std::byte* const mine = exchange.open();
  std::optional<Place> place;
  if (choice.color != NCCL_SPLIT_NOCOLOR) {
    std::ranges::sort(members);
    const auto self = std::ranges::find(members, parent.rank(), &Member::rank);
    place = Place{{}, static_cast<int>(members.size()), static_cast<int>(self - members.begin())};
  }
  const bool leads = place && place->rank == 0;
  if (leads) {
    place->id = makeUniqueId();
    std::memcpy(mine, &place->id, sizeof place->id);
  }
  exchange.publish();
  if (place && !leads) {
    std::memcpy(&place->id, exchange.read(members.front().rank), sizeof place->id);
  }
  exchange.close();
  return place;
}

ncclResult_t runSplit(Comm& parent, Choice choice, bool blocking, ncclComm_t* made) {
  std::optional<Place> place;
  {
    const Comm::Turn turn(parent, parent.ticketLock().take());
    try {
      place = rendezvousForSplit(parent, choice);
    } catch (const NcclError& failure) {
      // Fails the communicator, since the peers wait for this rank. The error may be this rank's
      // alone, such as too many open files.
      parent.fail(failure);
      throw;
    }
  }
  if (!place) return ncclSuccess;
  return joinAndComplete(place->id, place->ranks, place->rank, blocking, made);
}

ncclResult_t runShrink(
    Comm& parent, const std::vector<int>& survivors, uint64_t excludedHash, bool blocking,
    std::chrono::steady_clock::time_point deadline, ncclComm_t* made) {
  const auto self = std::ranges::find(survivors, parent.rank());
  const int rank = static_cast<int>(self - survivors.begin());
  std::optional<ncclUniqueId> id;
  if (rank == 0) {
    id = makeUniqueId();
    parent.offerShrink(excludedHash, *id);
  } else {
    id = parent.takeShrinkOffer(survivors.front(), excludedHash, deadline);
  }
  if (!id) return ncclInProgress;
  return joinAndComplete(*id, static_cast<int>(survivors.size()), rank, blocking, made);
}

}  // namespace

ncclResult_t initRank(
    ncclComm_t* made, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config) {
  constexpr const char* kName = "commInitRank";
  checkPointer(kName, "comm", made);
  publish(made, nullptr);
  checkNoGroup(kName);
  if (ranks < 1 || ranks > kMaxRanks) {
    invalidArgument(
        kName, "nranks is " + std::to_string(ranks) + ", wanted 1 to " + std::to_string(kMaxRanks));
  }
  checkRank(kName, "rank", rank, ranks);
  const bool blocking = checkConfig(kName, config, true);
  return joinAndComplete(id, ranks, rank, blocking, made);
}

ncclResult_t split(
    const std::shared_ptr<Comm>& parent, int color, int key, ncclComm_t* made,
    const ncclConfig_t* config) {
  constexpr const char* kName = "commSplit";
  checkPointer(kName, "newcomm", made);
  publish(made, nullptr);
  checkNoGroup(kName);
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) {
    invalidArgument(
        kName,
        "color is " + std::to_string(color) + ", wanted a number from 0 or NCCL_SPLIT_NOCOLOR");
  }
  const bool blocking = checkConfig(kName, config, parent->blocking());
  parent->checkUsable();
  return runSplit(*parent, {color, key}, blocking, made);
}

ncclResult_t shrink(
    const std::shared_ptr<Comm>& parent, const std::vector<int>& excluded, ncclComm_t* made,
    const ncclConfig_t* config, int flags, std::chrono::steady_clock::time_point deadline) {
  constexpr const char* kName = "commShrink";
  checkPointer(kName, "newcomm", made);
  publish(made, nullptr);
  checkNoGroup(kName);
  const bool blocking = checkConfig(kName, config, parent->blocking());
  if (flags != NCCL_SHRINK_DEFAULT && flags != NCCL_SHRINK_ABORT) {
    invalidArgument(
        kName, "shrinkFlags is " + std::to_string(flags) +
                   ", wanted NCCL_SHRINK_DEFAULT or NCCL_SHRINK_ABORT");
  }
  std::vector<bool> gone(parent->size(), false);
  for (const int rank : excluded) {
    checkRank(kName, "excludeRanksList", rank, parent->size());
    if (gone[rank]) {
      invalidArgument(kName, "excludeRanksList names rank " + std::to_string(rank) + " twice");
    }
    gone[rank] = true;
  }
  if (gone[parent->rank()]) {
    invalidArgument(
        kName, "excludeRanksList names this rank, " + std::to_string(parent->rank()) +
                   "; only the ranks that stay call it");
  }
  std::vector<int> survivors;
  for (int rank = 0; rank < parent->size(); ++rank) {
    if (!gone[rank]) survivors.push_back(rank);
  }
  const uint64_t hash = hashBytes(survivors.data(), survivors.size() * sizeof(int));
  if (flags == NCCL_SHRINK_ABORT) {
    parent->checkProcess();
    parent->fail(NcclError(
        ncclRemoteError,
        parent->whoAmI() + " shrinks the communicator and has ended its operations"));
  } else if (!parent->revoked()) {
    parent->checkUsable();
  }
  parent->awaitPlans();
  return runShrink(*parent, survivors, hash, blocking, deadline, made);
}

}  // namespace torchcomms_pg::shm
