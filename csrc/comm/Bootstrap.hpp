// How the ranks of a new group find each other through the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "comm/Operation.hpp"
#include "nccl/Library.hpp"

namespace torchcomms_pg {

struct Joined {
  ncclComm_t comm = nullptr;
  std::string unavailable;  // why there is no communicator
  std::string prefix;       // of the store's keys that are this group's alone; empty: a rank alone
};

// Joins `size` ranks through shared memory. `members` is the same on these
// ranks and on no others of the store, e.g. their global ranks. Collective: returns when every
// rank has come, with a communicator that may still be initializing. Ranks on
// different hosts get no communicator but the reason, naming rank and host.
// Raises CommError, naming them, when ranks do not come within `timeout`.
Joined joinOnHost(
    const NcclApi& api,
    c10d::Store& store,
    int rank,
    int size,
    const std::string& group,
    const std::string& members,
    Milliseconds timeout);

// Returns when every rank has come, on whichever hosts, with the prefix of the store's keys that
// is theirs alone. Arguments and errors as for joinOnHost.
std::string meet(
    c10d::Store& store,
    int rank,
    int size,
    const std::string& group,
    const std::string& members,
    Milliseconds timeout);

struct MetOverNccl {
  ncclUniqueId id;     // that rank 0 made
  std::string prefix;  // as in Joined
};

// How `size` ranks meet to communicate through libnccl. Collective; raises CommError on every rank,
// naming ranks and versions, when they did not load the same version of NCCL, and as joinOnHost
// when ranks do not come.
MetOverNccl meetOverNccl(
    const Library& library,
    c10d::Store& store,
    int rank,
    int size,
    const std::string& group,
    const std::string& members,
    Milliseconds timeout);

// The communicator of the ranks that share `id`; it may still be initializing.
// Raises CommError.
ncclComm_t initComm(
    const NcclApi& api, const ncclUniqueId& id, int rank, int size, const std::string& group);

}  // namespace torchcomms_pg
