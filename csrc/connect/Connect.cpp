#include "connect/Connect.hpp"

#include <c10/util/Logging.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "base/NeverDestroyed.hpp"
#include "base/TorchCompat.hpp"
#include "device/AcceleratorDevice.hpp"
#include "gloo/Api.hpp"
#include "shm/api/Api.hpp"

namespace torchcomms_pg {

namespace {

// Path of the library that each type of simulated accelerator uses; empty for shared memory. Null
// for a type that is not simulated.
std::array<
    std::atomic<const std::string*>,
    static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)>
    hostStreams{};

// Makes a Communicator that owns `made`. After an error, fails and aborts `made`.
std::shared_ptr<Communicator> own(
    const RendezvousInfo& info, const Library& library, CommHandle::Made made, const Met& met,
    const Communicator::Place& place, const NcclConfig& config = {}) {
  std::shared_ptr<Communicator> comm;
  auto* const handle = made.comm;
  try {
    comm = Monitor::watch<Communicator>(
        library, std::move(made), info.rank, info.size, info.group, info.timeout, place, config);
  } catch (const std::exception& error) {
    const auto rank = std::to_string(info.rank);
    library.fail(
        handle, ncclRemoteError, "rank " + rank + " cannot join: " + error.what(), {info.rank});
    if (handle != nullptr) {
      library.commAbort(handle);
    }
    throw;
  }
  comm->watchdog().open(info.store, met.prefix, met.peers);
  return comm;
}

void logOnce(const Libnccl& library) {
  static std::once_flag once;
  std::call_once(once, [&] {
    LOG(INFO) << "torchcomms_pg: NCCL " << versionText(library.version()) << " at "
              << library.path() << " (" << library.origin() << ")";
  });
}

// Joins the ranks that share memory with this rank, and returns their communicator. `peers` are the
// processes of all ranks.
ncclComm_t joinInside(
    const RendezvousInfo& info, const std::vector<Peer>& peers, const gloo::Topology& topology) {
  auto inside = info;
  inside.rank = topology.local();
  inside.size = static_cast<int>(topology.inside().size());
  inside.numbers = topology.inside();
  inside.members += "/host " + std::to_string(topology.host());
  inside.known.clear();
  for (const int rank : topology.inside()) {
    inside.known.push_back(peers[rank]);
  }
  ncclComm_t made = nullptr;
  try {
    joinOnHost(
        shm::library(), inside, [&](ncclComm_t comm, const Met&) -> std::shared_ptr<Communicator> {
          made = comm;
          return nullptr;
        });
  } catch (const std::exception& error) {
    if (made != nullptr) {
      shm::library().commAbort(made);
    }
    if (const auto* const known = dynamic_cast<const CommError*>(&error)) {
      auto failure = known->failure();
      for (int& rank : failure.ranks) {
        rank = topology.inside()[rank];
      }
      throw CommError(std::move(failure));
    }
    throw;
  }
  return made;
}

// Connects ranks that have met in the store: through shared memory if `placeOf` returns equal names
// for them, otherwise through Gloo. If `placeOf` is null, no ranks share memory.
std::shared_ptr<Communicator> connectMet(
    RendezvousInfo info, const ConnectGloo& connectGloo, gloo::Connected connected,
    std::string (*placeOf)(const Peer& peer), const Met& met, const std::function<void()>& look) {
  std::vector<std::string> places;
  const auto& here = met.peers[info.rank].host;
  const bool acrossHosts = std::ranges::count(met.peers, here, &Peer::host) < info.size;
  for (int rank = 0; rank < info.size; ++rank) {
    places.push_back(placeOf == nullptr ? std::to_string(rank) : placeOf(met.peers[rank]));
    if (placeOf != nullptr) {
      info.group.hosts.push_back(met.peers[rank].host);
    }
  }
  const auto topology = gloo::Topology::of(places, info.group.hosts, info.rank);
  const auto died = [peers = met.peers](int rank) {
    const auto& peer = peers[rank];
    return peer.dead() ? "(pid " + std::to_string(peer.pid) + ") died" : "";
  };
  auto* const comm = gloo::newComm(
      {.store = c10::make_intrusive<c10d::PrefixStore>(met.prefix + "gloo", info.store),
       .topology = topology,
       .inside = joinInside(info, met.peers, *topology),
       .connect = [connectGloo, acrossHosts](
                      c10::intrusive_ptr<c10d::Store> store, int rank,
                      int size) { return connectGloo(std::move(store), rank, size, acrossHosts); },
       .timeout = info.timeout,
       .died = died},
      connected, look);
  return own(info, gloo::library(), {comm}, met, {});
}

}  // namespace

void useHostStreams(c10::DeviceType type, const std::string& library) {
  // Leaked: another thread may still use the previous path.
  hostStreams[static_cast<size_t>(type)] = &neverDestroyed<std::string>(library);
}

void checkCarried(const char* what, const std::string& group, c10::Device device) {
  TORCH_CHECK_VALUE(
      device.is_cuda() || hostStreams[static_cast<size_t>(device.type())] != nullptr, what,
      ": the tensor is on ", device, ", and group '", group,
      "' communicates CPU tensors and, through NCCL where there is a GPU, CUDA tensors; move it "
      "with tensor.to('cpu')");
}

void refuseCapture(const std::string& group, c10::Device device) {
  TORCH_CHECK(
      !isCapturing(currentStream(device)), "group '", group, "' has no connections for ", device,
      " yet, and a graph is being captured; run one operation of the group before the capture, or "
      "pass device_id to init_process_group");
}

std::shared_ptr<Communicator> connectHosts(
    const RendezvousInfo& info, const ConnectGloo& connectGloo, std::vector<Peer>* peers) {
  const auto share = [&](ncclComm_t comm, const Met& met) {
    return own(info, shm::library(), {comm}, met, {});
  };
  const auto overGloo = [&](const Met& met, const std::function<void()>& look) {
    return connectMet(
        info, connectGloo,
        presentAccelerator() ? gloo::Connected::whenNeeded : gloo::Connected::now,
        [](const Peer& peer) { return peer.place(); }, met, look);
  };
  auto joined = joinOnHost(
      shm::library(), info, share, {}, connectGloo != nullptr ? Connecting(overGloo) : nullptr);
  TORCH_CHECK(
      joined.comm != nullptr, "'", info.group.name,
      "' goes through shared memory, and its ranks are on different hosts: ", joined.unavailable,
      ". Use backend 'gloo', or one communicator for each host");
  if (peers != nullptr) {
    *peers = std::move(joined.peers);
  }
  return std::move(joined.comm);
}

std::shared_ptr<Communicator> connectThroughGloo(
    const RendezvousInfo& info, const ConnectGloo& connectGloo) {
  return rendezvous(info, [&](const Met& met, const std::function<void()>& look) {
    return connectMet(info, connectGloo, gloo::Connected::now, nullptr, met, look);
  });
}

std::shared_ptr<Communicator> connect(
    const RendezvousInfo& info, c10::Device device, const AcceleratorOptions& options) {
  const auto make = [&](const Library& library, CommHandle::Made made, const Met& met,
                        const NcclConfig& config) {
    const Communicator::Place place{device, options.highPriority, met.pair};
    return own(info, library, std::move(made), met, place, config);
  };
  const auto& name = info.group.name;
  checkCarried("connect", name, device);
  const int count = deviceCount(device.type());
  TORCH_CHECK_VALUE(
      device.index() < count, "group '", name, "' cannot communicate tensors on ", device,
      ": torch sees ", count,
      " such devices here. It takes a GPU, its driver, and a torch that is built for it");
  refuseCapture(name, device);
  const std::string* const onHost = hostStreams[static_cast<size_t>(device.type())];
  if (onHost != nullptr && onHost->empty()) {
    options.config.check(shm::oldNccl());
    auto joined = joinOnHost(
        shm::oldNccl(), info,
        [&](ncclComm_t comm, const Met& met) {
          return make(shm::oldNccl(), {comm}, met, options.config);
        },
        options.config);
    TORCH_CHECK(
        joined.comm != nullptr, "group '", name, "': tensors on ", device,
        " go through shared memory, and its ranks are on different hosts: ", joined.unavailable);
    return std::move(joined.comm);
  }
  const auto& library = Libnccl::load(
      onHost != nullptr ? LibrarySearch{.path = *onHost, .folder = ""} : options.library);
  logOnce(library);
  options.config.check(library);
  const auto config = options.named ? options.config.named(library, name) : options.config;
  const auto met = rendezvousOverNccl(library, info, options.ranksPerRoot);
  auto call = joinOverNccl(library, met.ids, among(info, met.met.pair), device, config);
  auto comm = make(library, {nullptr, std::move(call)}, met.met, config);
  comm->watchdog().watchOver();
  return comm;
}

}  // namespace torchcomms_pg
