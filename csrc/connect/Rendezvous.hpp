// The rendezvous of a new group's ranks through the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/BlockingCall.hpp"
#include "comm/Peer.hpp"
#include "nccl/Config.hpp"
#include "nccl/Library.hpp"
#include "operation/Group.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class Communicator;

// Input of a rendezvous. Apart from `rank`, `known` and `peer`, the ranks pass the same values.
//
// `members`: a key that these ranks share and no other ranks of the store use, e.g. their global
// ranks.
// `known`: the ranks' processes, by rank, as far as another group knows them. May be empty, or have
// peers without a pid.
// `numbers`: if these ranks are a part of `group`, their numbers in `group`, by rank, for use in
// texts; otherwise empty. Everything else uses the ranks themselves.
// `peer`: the other rank of a message, or -1 if all ranks are needed. If two ranks name each other
// and not all ranks arrive soon, the two connect alone.
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

  // Return the names of ranks for texts.
  std::string nameOf(int rank) const { return namesOf({rank}); }
  std::string namesOf(std::vector<int> ranks) const {
    for (int& rank : ranks) {
      rank = numbers.empty() ? rank : numbers[rank];
    }
    return group.rankNames(ranks);
  }
};

// Shortens `name` for use in a store's key: returns all of it, or its beginning and a hash. torch's
// store closes the connection at a key of 8 KiB.
std::string keyOf(const std::string& name);

struct JoinResult {
  std::shared_ptr<Communicator> comm;
  std::string unavailable;  // reason if `comm` is null
  std::vector<Peer> peers;  // processes by rank; empty for a single rank
};

// Result of a rendezvous. All fields are empty for a single rank.
struct Met {
  std::string prefix;       // prefix of the store's keys that only these ranks use
  std::vector<Peer> peers;  // processes by rank; without a pid if unknown
  std::vector<int> pair;    // the two ranks that connected alone; empty if all did
};

// Makes a Communicator from the library's communicator, which may still be initializing.
using Make = std::function<std::shared_ptr<Communicator>(ncclComm_t comm, const Met& met)>;

// Makes the communicator after the rendezvous. `look` raises host::NcclError if another rank has
// died or cannot join, and the exception of a signal's handler.
using Connecting =
    std::function<std::shared_ptr<Communicator>(const Met& met, const std::function<void()>& look)>;

// Joins the ranks through shared memory. Collective: returns when every rank has joined. Ranks on
// different hosts or in different containers cannot see each other's processes; they get what
// `elsewhere` makes, or if that is null no communicator but the reason, which names rank and host.
// Raises CommError:
// - if ranks do not arrive within the timeout, naming them;
// - if a rank has died, naming it, within a second after a rank on its host that has arrived knows
//   its process, from `known` or from the dead rank's own message;
// - if a rank cannot join, with its reason on all ranks;
// - if the store is gone, naming no rank.
JoinResult joinOnHost(
    const Library& library,
    const RendezvousInfo& info,
    const Make& make,
    const NcclConfig& config = {},
    const Connecting& elsewhere = nullptr);

// Returns when every rank has arrived, on whichever hosts. Raises the errors of joinOnHost. If
// `make` raises, the ranks that still wait get its reason.
std::shared_ptr<Communicator> rendezvous(const RendezvousInfo& info, const Connecting& make);

struct NcclRendezvous {
  std::vector<ncclUniqueId> ids;  // the same on all ranks; several for ncclCommInitRankScalable
  Met met;
};

// Returns `info` with rank and size inside the pair, or unchanged if `pair` is empty.
RendezvousInfo among(RendezvousInfo info, const std::vector<int>& pair);

// Exchanges the unique ids with which the ranks join through libnccl. Collective. If the ranks
// loaded different versions of NCCL, raises CommError with ranks and versions on every rank. If
// ranks do not arrive, raises as joinOnHost does. If the library can start from several unique ids,
// one rank in every `ranksPerRoot` makes one, so that no single rank has to serve all ranks of a
// large group.
NcclRendezvous rendezvousOverNccl(
    const Library& library, const RendezvousInfo& info, int ranksPerRoot);

// Starts the call that makes the communicator of the ranks that share `ids`, on `device`.
std::unique_ptr<BlockingCall> joinOverNccl(
    const Library& library,
    std::vector<ncclUniqueId> ids,
    const RendezvousInfo& info,
    c10::Device device,
    const NcclConfig& config);

}  // namespace torchcomms_pg
