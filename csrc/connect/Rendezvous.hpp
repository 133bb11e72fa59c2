// Rendezvous of a new group's ranks through the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "handle/BlockingCall.hpp"
#include "host/Peer.hpp"
#include "nccl/Config.hpp"
#include "nccl/Library.hpp"
#include "operation/Group.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Communicator;

// Input of a rendezvous. All ranks pass the same values, except for `rank`, `known` and `peer`.
//
// `members`: a key for these ranks, e.g. their global ranks. No other ranks use it with this store.
// `known`: the ranks' processes, by rank, as another group knows them. A process that is not known
// has no pid. Empty if none is known.
// `numbers`: by rank, the rank in `group` if these ranks are only a part of `group`; otherwise
// empty. Only texts use these numbers.
// `peer`: the other rank of a message, or -1 if all ranks are needed. If two ranks name each other,
// and the rest does not arrive soon, the two connect alone.
// `proceed`: raises if this rank is no longer to join; called while it waits. May be null.
struct RendezvousInfo {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  Group group;
  std::string members;
  Milliseconds timeout;
  std::vector<Peer> known = {};
  std::vector<int> numbers = {};
  int peer = -1;
  std::function<void()> proceed = nullptr;

  // Return the names of ranks for texts.
  std::string nameOf(int rank) const { return namesOf({rank}); }
  std::string namesOf(std::vector<int> ranks) const {
    for (int& rank : ranks) {
      rank = numbers.empty() ? rank : numbers[rank];
    }
    return group.rankNames(ranks);
  }
};

// Returns `name` for use in a store's key: a long name is cut, and a hash is appended. torch's
// store closes a connection that sends a key of 8 KiB.
std::string keyOf(const std::string& name);

struct JoinResult {
  std::shared_ptr<Communicator> comm;
  std::string unavailable;  // why ranks share no memory; empty if all do
  std::vector<Peer> peers;  // processes by rank; empty for a single rank
};

// Result of a rendezvous. All fields are empty for a single rank.
struct Met {
  std::string prefix;       // prefix of keys in the store that only these ranks use
  std::vector<Peer> peers;  // processes by rank; no pid if unknown
  std::vector<int> pair;    // the two ranks that connected alone, or empty
};

// Makes a Communicator from the library's communicator, which may still be initializing.
using Make = std::function<std::shared_ptr<Communicator>(ncclComm_t comm, const Met& met)>;

// Makes the communicator after the rendezvous. Calls `look` while it waits: `look` raises
// host::NcclError if another rank has died or cannot join, or the exception of a signal handler.
using Connecting =
    std::function<std::shared_ptr<Communicator>(const Met& met, const std::function<void()>& look)>;

// Joins the ranks through shared memory. Collective: returns when every rank has joined. If the
// ranks are on several hosts or in several containers, they cannot share memory: `elsewhere` then
// makes the communicator. If `elsewhere` is null, the result has no communicator. Raises CommError:
// - if ranks do not arrive within the timeout, naming them;
// - if a rank has died, naming it, within a second. This needs a rank of the same host that has
//   arrived and knows the process, from `known` or from the dead rank's value in the store;
// - if a rank cannot join, with its reason on all ranks;
// - if the store is gone, naming no rank unless a known rank has died with it.
JoinResult joinOnHost(
    const Library& library, const RendezvousInfo& info, const Make& make,
    const NcclConfig& config = {}, const Connecting& elsewhere = nullptr);

// Calls `make` when every rank has arrived, on any hosts, and returns its communicator. Raises as
// joinOnHost(). If `make` raises, the ranks that still wait get the reason.
std::shared_ptr<Communicator> rendezvous(const RendezvousInfo& info, const Connecting& make);

struct NcclRendezvous {
  std::vector<ncclUniqueId> ids;  // equal on all ranks; several only for ncclCommInitRankScalable
  Met met;
};

// Returns `info` with the rank inside `pair` and size 2; unchanged if `pair` is empty.
RendezvousInfo among(RendezvousInfo info, const std::vector<int>& pair);

// Exchanges the unique ids with which the ranks join through libnccl. Collective. If the ranks have
// loaded different versions of NCCL, raises CommError with ranks and versions on every rank. If
// ranks do not arrive, raises as joinOnHost(). If the library takes several unique ids, one rank of
// every `ranksPerRoot` makes one, so that no rank has to serve all ranks of a large group.
NcclRendezvous rendezvousOverNccl(
    const Library& library, const RendezvousInfo& info, int ranksPerRoot);

// Starts and returns the call that joins the ranks with these `ids` in a communicator on `device`.
std::unique_ptr<BlockingCall> joinOverNccl(
    const Library& library, std::vector<ncclUniqueId> ids, const RendezvousInfo& info,
    c10::Device device, const NcclConfig& config);

}  // namespace torchcomms_pg
