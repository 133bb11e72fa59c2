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

// Input that the ranks of a new communicator have in common, but for `rank`. `members` is the same
// on these ranks and on no others of the store, e.g. their global ranks. `known`: the ranks'
// processes, by rank, as far as another group knows them; may be empty, or have peers without a
// pid. `numbers`: the ranks' numbers in `group`, by rank, if these are only a part of the group;
// empty: the same numbers. Texts have these numbers, all else the ranks' own. `peer`: the one rank
// that this one exchanges a message with; the two connect where each wants the other and not all
// ranks come soon. -1: all ranks are needed.
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

  // Return the name of ranks in texts.
  std::string nameOf(int rank) const { return namesOf({rank}); }
  std::string namesOf(std::vector<int> ranks) const {
    for (int& rank : ranks) {
      rank = numbers.empty() ? rank : numbers[rank];
    }
    return group.rankNames(ranks);
  }
};

// Makes `name` a part of a store's key: all of it, or its beginning and a hash. Torch's store
// breaks the connection at a key of 8 KiB.
std::string keyOf(const std::string& name);

struct JoinResult {
  std::shared_ptr<Communicator> comm;
  std::string unavailable;  // reason why there is no communicator
  std::vector<Peer> peers;  // processes by rank; empty: a rank alone
};

// What the ranks of a group know once they have met; all is empty for a rank alone.
struct Met {
  std::string prefix;       // that of the store's keys that are these ranks' alone
  std::vector<Peer> peers;  // processes by rank; those without a pid are not known
  std::vector<int> pair;    // the two ranks that have connected for a message; empty: all have
};

// Makes a communicator of the library's, which may still be initializing.
using Make = std::function<std::shared_ptr<Communicator>(ncclComm_t comm, const Met& met)>;

// Joins the ranks through shared memory. Collective: returns when every rank has joined. Ranks that
// cannot see each other's processes, on different hosts or in different containers, get no
// communicator but the reason, naming rank and host. Raises CommError: naming the ranks that do not
// come within the timeout; naming a rank that has died, within a second of the time when its
// process is known, from `known` or from the rank itself, to a rank of its host that has come; with
// the reason of a rank that cannot join, on all of them; and naming nobody where the store is gone.
JoinResult joinOnHost(
    const NcclApi& api,
    const RendezvousInfo& info,
    const Make& make,
    const NcclConfig& config = {});

// Does what remains to be done once the ranks have met. `look` raises host::NcclError if another
// rank has died or cannot join, and what a handler of a signal has raised.
using Connecting =
    std::function<std::shared_ptr<Communicator>(const Met& met, const std::function<void()>& look)>;

// Returns when every rank has come, on whichever hosts. Raises the errors of joinOnHost. If `make`
// raises, the other ranks are told why, if they still wait.
std::shared_ptr<Communicator> rendezvous(const RendezvousInfo& info, const Connecting& make);

struct NcclRendezvous {
  std::vector<ncclUniqueId> ids;  // the same on all ranks; several: for ncclCommInitRankScalable
  Met met;
};

// Returns the same for the ranks of a pair alone, by their places in it; unchanged where it is
// empty.
RendezvousInfo among(RendezvousInfo info, const std::vector<int>& pair);

// Joins the ranks to communicate through libnccl. Collective; raises CommError on every rank,
// naming ranks and versions, when they did not load the same version of NCCL, and as joinOnHost
// when ranks do not come. Where the library can start from several unique ids, there is one for
// every `ranksPerRoot` ranks, so that a single rank does not have to serve all of a large group.
NcclRendezvous rendezvousOverNccl(
    const Library& library, const RendezvousInfo& info, int ranksPerRoot);

// Starts the call that makes the communicator of the ranks that share `ids`, on `device`.
std::unique_ptr<BlockingCall> joinOverNccl(
    const NcclApi& api,
    std::vector<ncclUniqueId> ids,
    const RendezvousInfo& info,
    c10::Device device,
    const NcclConfig& config);

}  // namespace torchcomms_pg
