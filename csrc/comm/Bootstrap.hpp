// How the ranks of a new group find each other through the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "comm/Group.hpp"
#include "comm/Operation.hpp"
#include "nccl/Config.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

// What the ranks of a new communicator have in common, but for `rank`. `members` is the same on
// these ranks and on no others of the store, e.g. their global ranks.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  Group group;
  std::string members;
  Milliseconds timeout;
};

// `name` as a part of a store's key: all of it, or its beginning and a hash. Torch's store breaks
// the connection at a key of 8 KiB.
std::string keyOf(const std::string& name);

struct Joined {
  ncclComm_t comm = nullptr;
  std::string unavailable;  // why there is no communicator
  std::string prefix;       // of the store's keys that are this group's alone; empty: a rank alone
};

// Joins the ranks through shared memory. Collective: returns when every rank has come, with a
// communicator that may still be initializing. Ranks on different hosts get no communicator but
// the reason, naming rank and host. Raises CommError, naming them, when ranks do not come within
// the timeout.
Joined joinOnHost(const NcclApi& api, const Meeting& meeting, const NcclConfig& config = {});

// Returns when every rank has come, on whichever hosts, with the prefix of the store's keys that
// is theirs alone. Errors as of joinOnHost.
std::string meet(const Meeting& meeting);

struct MetOverNccl {
  std::vector<ncclUniqueId> ids;  // the same on all ranks; several: for ncclCommInitRankScalable
  std::string prefix;             // as in Joined
};

// How the ranks meet to communicate through libnccl. Collective; raises CommError on every rank,
// naming ranks and versions, when they did not load the same version of NCCL, and as joinOnHost
// when ranks do not come. Where the library can start from several unique ids, there is one for
// every `ranksPerRoot` ranks, so that a single rank does not have to serve all of a large group.
MetOverNccl meetOverNccl(const Library& library, const Meeting& meeting, int ranksPerRoot);

// The communicator of the ranks that share `ids`; it may still be initializing. `config` has to
// live as long as it does, or a copy. Raises CommError.
ncclComm_t initComm(
    const NcclApi& api,
    std::vector<ncclUniqueId> ids,
    const Meeting& meeting,
    const NcclConfig& config);

}  // namespace torchcomms_pg
