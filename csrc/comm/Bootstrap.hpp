// How the ranks of a new group find each other through the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "comm/Operation.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

struct Joined {
  ncclComm_t comm = nullptr;
  std::string unavailable;  // why there is no communicator
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

}  // namespace torchcomms_pg
