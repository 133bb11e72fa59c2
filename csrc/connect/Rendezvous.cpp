#include "connect/Rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "comm/Communicator.hpp"
#include "connect/StoreRendezvous.hpp"
#include "host/Interrupt.hpp"
#include "host/Process.hpp"
#include "operation/CommError.hpp"
#include "shm/segment/Layout.hpp"

namespace torchcomms_pg {

namespace {

// Starts the monitor's thread before this rank arrives, so that an error of the start is raised
// before the peers rely on this rank.
using MonitorRuns = Monitor::Hold;

void check(const Library& library, ncclResult_t result, const RendezvousInfo& info) {
  if (result == ncclSuccess || result == ncclInProgress) {
    return;
  }
  const std::string text = library.getLastError(nullptr);
  failInit(info.group.name, text.empty() ? library.getErrorString(result) : text, {info.rank});
}

// Starts to join the ranks that share `id`, in host memory, and returns the communicator. The join
// goes on in the background.
ncclComm_t joinHere(
    const Library& library, ncclUniqueId id, const RendezvousInfo& info, const NcclConfig& config) {
  auto raw = config.raw(/*blocking=*/false);
  ncclComm_t comm = nullptr;
  check(library, library.init(&comm, {&id, 1}, info.size, info.rank, &raw), info);
  return comm;
}

// Returns kId and a new unique id, or a refusal.
std::string newId(const Library& library, const RendezvousInfo& info) {
  ncclUniqueId id;
  if (library.getUniqueId(&id) != ncclSuccess) {
    return refusal(
        info.nameOf(info.rank) + " could not make a unique id: " + library.getLastError(nullptr));
  }
  return kId + std::string(id.internal, sizeof(id.internal));
}

// Reads the `count` unique ids from rank 0's answer. Raises if the store holds anything else.
std::vector<ncclUniqueId> readIds(
    const RendezvousInfo& info, const std::string& answer, size_t count) {
  const size_t wanted = count * sizeof(ncclUniqueId);
  if (answer.front() != kId || answer.size() - 1 != wanted) {
    failInit(
        info.group.name,
        "rank 0's answer in the store, of " + std::to_string(answer.size()) + " bytes, is not " +
            (count == 1 ? std::string("a unique id") : std::to_string(count) + " unique ids") +
            " as rank " + std::to_string(info.rank) +
            " wants them: all ranks need the same torchcomms_pg and the same "
            "TORCH_NCCL_RANKS_PER_ROOT, and a store that no other program writes to");
  }
  std::vector<ncclUniqueId> ids(count);
  std::memcpy(ids.data(), answer.data() + 1, wanted);
  return ids;
}

// Returns a text that says why the ranks cannot share memory; empty if they can.
std::string whoIsElsewhere(const std::vector<Peer>& peers) {
  std::vector<std::string> hosts;
  std::vector<std::string> places;
  for (const auto& peer : peers) {
    hosts.push_back(peer.host);
    places.push_back(peer.place());
  }
  const auto different = differences(hosts, "on host");
  return different.empty() ? differences(places, "in container (host/boot-pid namespace)")
                           : different;
}

// Returns a text that names a host with too many ranks; empty if no host has too many.
std::string fullHost(const std::vector<Peer>& peers) {
  std::map<std::string, int> ranks;
  for (const auto& peer : peers) {
    if (++ranks[peer.place()] > shm::kMaxRanks) {
      return "host '" + peer.host + "' has more than " + std::to_string(shm::kMaxRanks) +
             " ranks of the group, which is the most that can share memory; start fewer on it";
    }
  }
  return "";
}

// Returns the ranks that make the `count` unique ids, in the order of the ids. They are spread over
// all ranks as NCCL expects.
std::vector<int> rootsOf(int size, int count) {
  std::vector<int> roots;
  for (int i = 0; i < count; ++i) {
    roots.push_back(i * (size / count) + std::min(i, size % count));
  }
  return roots;
}

// Returns rank 0's answer. `said` has each rank's version of NCCL, followed by a unique id if the
// rank is a root. `pair`: see differences().
std::string gatherIds(
    const std::vector<std::string>& said, const std::vector<int>& roots,
    const std::vector<int>& pair = {}) {
  std::vector<std::string> versions;
  std::vector<std::string> ids;
  for (const auto& text : said) {
    const auto end = std::min(text.find_first_of({kId, kRefusal}), text.size());
    versions.push_back(text.substr(0, end));
    ids.push_back(text.substr(end));
  }
  if (const auto different = differences(versions, "with NCCL", pair); !different.empty()) {
    return refusal(
        different +
        "; all ranks must load the same version (python -m torchcomms_pg.nccl tells which)");
  }
  std::string all(1, kId);
  for (const int root : roots) {
    if (ids[root].empty()) {
      return refusal(
          "rank " + std::to_string(root) +
          " made no unique id; TORCH_NCCL_RANKS_PER_ROOT must be the same on all ranks");
    }
    if (ids[root].front() == kRefusal) {
      return ids[root];
    }
    all += ids[root].substr(1);
  }
  return all;
}

// Returns the lower rank's answer for a pair: a new unique id, or a refusal if the versions in
// `said` differ.
std::string pairIds(
    const Library& library, const RendezvousInfo& info, std::vector<std::string> said) {
  for (auto& text : said) {
    text = text.substr(0, text.find_first_of({kId, kRefusal}));
  }
  const auto id = newId(library, info);
  if (id.front() == kId) {
    said.front() += id;
  }
  return id.front() == kId ? gatherIds(said, {0}, {info.rank, info.peer}) : id;
}

// Calls `make` for the communicator of the ranks that have met. Raises the reason of another rank
// that cannot join, or else the error of `make`.
std::shared_ptr<Communicator> makeLooking(
    StoreRendezvous& rendezvous, const std::string& group, const Connecting& make) {
  const auto look = [&] {
    try {
      rendezvous.look();
    } catch (const CommError& error) {
      throw host::NcclError(ncclRemoteError, reasonOf(group, error), error.failure().ranks);
    }
  };
  try {
    return make(rendezvous.met(), look);
  } catch (const host::NcclError& failure) {
    rendezvous.checkRefused();
    failInit(group, failure.what(), failure.ranks);
  } catch (const std::exception&) {
    rendezvous.checkRefused();
    throw;
  }
}

}  // namespace

RendezvousInfo among(RendezvousInfo info, const std::vector<int>& pair) {
  if (!pair.empty()) {
    info.rank = info.rank == pair.front() ? 0 : 1;
    info.size = 2;
  }
  return info;
}

std::string keyOf(const std::string& name) {
  constexpr size_t kLongest = 200;
  if (name.size() <= kLongest) {
    return name;
  }
  return name.substr(0, kLongest) + "..." + std::to_string(name.size()) + "/" +
         std::to_string(host::hashBytes(name.data(), name.size()));
}

JoinResult joinOnHost(
    const Library& library, const RendezvousInfo& info, const Make& make, const NcclConfig& config,
    const Connecting& elsewhere) {
  if (info.size == 1) {
    std::vector<ncclUniqueId> ids(1);
    check(library, library.getUniqueId(&ids.front()), info);
    return {make(joinHere(library, ids.front(), info, config), {}), "", {}};
  }
  StoreRendezvous rendezvous(info);
  return rendezvous.run([&]() -> JoinResult {
    const MonitorRuns monitor;
    const auto judge = [&](const std::vector<std::string>&) {
      if (const auto full = fullHost(rendezvous.peers()); !full.empty()) {
        return refusal(full);
      }
      const auto elsewhere = whoIsElsewhere(rendezvous.peers());
      return elsewhere.empty() ? newId(library, info) : kApart + elsewhere;
    };
    const auto answer = rendezvous.exchange("", judge, judge);
    if (answer.front() == kApart) {
      auto comm = elsewhere ? makeLooking(rendezvous, info.group.name, elsewhere) : nullptr;
      return {std::move(comm), answer.substr(1), rendezvous.peers()};
    }
    const auto met = rendezvous.met();
    auto* const handle =
        joinHere(library, readIds(info, answer, 1).front(), among(info, met.pair), config);
    auto comm = make(handle, met);
    try {
      rendezvous.awaitJoined(library, handle);
    } catch (const std::exception& error) {
      const auto failure = rendezvous.blame(error);
      library.fail(handle, failure.result, failure.what(), failure.ranks);
      throw;
    }
    return {std::move(comm), "", rendezvous.peers()};
  });
}

NcclRendezvous rendezvousOverNccl(
    const Library& library, const RendezvousInfo& info, int ranksPerRoot) {
  NcclRendezvous met;
  if (info.size == 1) {
    met.ids.resize(1);
    check(library, library.getUniqueId(&met.ids.front()), info);
    return met;
  }
  const int count =
      library.has(Feature::severalIds) ? (info.size + ranksPerRoot - 1) / ranksPerRoot : 1;
  const auto roots = rootsOf(info.size, count);
  auto mine = versionText(library.version());
  if (std::ranges::count(roots, info.rank) > 0) {
    mine += newId(library, info);
  }
  StoreRendezvous rendezvous(info);
  return rendezvous.run([&] {
    const MonitorRuns monitor;
    const auto answer = rendezvous.exchange(
        mine, [&](const std::vector<std::string>& said) { return gatherIds(said, roots); },
        [&](const std::vector<std::string>& said) { return pairIds(library, info, said); });
    met.met = rendezvous.met();
    met.ids = readIds(info, answer, met.met.pair.empty() ? roots.size() : 1);
    return met;
  });
}

std::unique_ptr<BlockingCall> joinOverNccl(
    const Library& library, std::vector<ncclUniqueId> ids, const RendezvousInfo& info,
    c10::Device device, const NcclConfig& config) {
  return std::make_unique<BlockingCall>(
      library, device,
      [&library, ids = std::move(ids), size = info.size, rank = info.rank,
       config](ncclComm_t* made) {
        auto raw = config.raw(/*blocking=*/true);
        auto all = ids;
        return library.init(made, all, size, rank, &raw);
      });
}

std::shared_ptr<Communicator> rendezvous(const RendezvousInfo& info, const Connecting& make) {
  StoreRendezvous rendezvous(info);
  return rendezvous.run([&] {
    const MonitorRuns monitor;
    const auto meet = [](const std::vector<std::string>&) { return std::string(1, kId); };
    rendezvous.exchange("", meet, meet);
    return makeLooking(rendezvous, info.group.name, make);
  });
}

}  // namespace torchcomms_pg
