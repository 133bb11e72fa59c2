#include "shm/Window.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "shm/Comm.hpp"
#include "shm/Host.hpp"
#include "shm/api/GroupCalls.hpp"
#include "shm/api/ResultCodes.hpp"
#include "shm/api/Validate.hpp"
#include "shm/segment/ForkSafe.hpp"

namespace torchcomms_pg::shm {
namespace {

// Bytes that a put copies between two checks for a failure of the communicator.
constexpr size_t kPiece = 4 << 20;

constexpr const char* kRegister = "commWindowRegister";

WindowView mapPeer(const Comm& comm, int peer, const MemoryAddress& address) {
  try {
    return {mapMemory(address), address.bytes};
  } catch (const NcclError& failure) {
    // Raises an error that says more if the peer has left or died.
    comm.waiter().checkPeers([peer](int rank) { return rank == peer; });
    throw NcclError(
        failure.result, std::string(kRegister) + ": memory of rank " + std::to_string(peer) + ": " +
                            failure.what());
  }
}

// The windows of all communicators of this process. Handles are unique in the process.
struct Registry {
  Mutex mutex;
  std::map<uintptr_t, std::weak_ptr<const MappedWindow>> windows GUARDED_BY(mutex);
  uintptr_t next GUARDED_BY(mutex) = 1;
};

uintptr_t enroll(const std::shared_ptr<const MappedWindow>& window) {
  auto& all = forkSafe<Registry>();
  LockGuard lock(all.mutex);
  std::erase_if(all.windows, [](const auto& entry) { return entry.second.expired(); });
  all.windows[all.next] = window;
  return all.next++;
}

void discharge(uintptr_t handle) {
  auto& all = forkSafe<Registry>();
  LockGuard lock(all.mutex);
  all.windows.erase(handle);
}

}  // namespace

ncclWindow_t Windows::add(void* buffer, size_t bytes, const std::shared_ptr<Memory>& memory) {
  auto window = std::make_shared<MappedWindow>();
  comm_.inTurn(CollectiveKind::window, [&](Exchange& exchange) {
    const auto addresses =
        exchange.gather(memory ? memory->address(buffer, bytes) : MemoryAddress{});
    for (int rank = 0; rank < comm_.size(); ++rank) {
      window->push_back(
          rank == comm_.rank() ? WindowView{{memory, static_cast<std::byte*>(buffer)}, bytes}
                               : mapPeer(comm_, rank, addresses[rank]));
    }
    // Waits until every rank has mapped this rank's memory, which the user may then free.
    exchange.gather('\0');
  });

  const uintptr_t handle = enroll(window);
  LockGuard lock(mutex_);
  windows_[handle] = std::move(window);
  return reinterpret_cast<ncclWindow_t>(handle);
}

void Windows::remove(ncclWindow_t handle) {
  std::shared_ptr<const MappedWindow>
      window;  // declared before the lock, so that it is destroyed after unlocking
  LockGuard lock(mutex_);
  const auto found = windows_.find(reinterpret_cast<uintptr_t>(handle));
  if (found == windows_.end()) {
    invalidArgument(
        "commWindowDeregister",
        "win is not a window of this communicator, or is already deregistered");
  }
  window = std::move(found->second);
  discharge(found->first);
  windows_.erase(found);
}

std::shared_ptr<const MappedWindow> Windows::find(
    ncclWindow_t handle, const char* operation) const {
  LockGuard lock(mutex_);
  const auto found = windows_.find(reinterpret_cast<uintptr_t>(handle));
  if (found == windows_.end()) {
    invalidArgument(operation, "win is not a window of this communicator, or was deregistered");
  }
  return found->second;
}

std::shared_ptr<const MappedWindow> Windows::findAnywhere(
    ncclWindow_t handle, const char* operation) {
  auto& all = forkSafe<Registry>();
  LockGuard lock(all.mutex);
  const auto found = all.windows.find(reinterpret_cast<uintptr_t>(handle));
  auto window = found == all.windows.end() ? nullptr : found->second.lock();
  if (window == nullptr) {
    invalidArgument(operation, "window is not registered, or was deregistered");
  }
  return window;
}

void Windows::expect(SignalWait& wait) {
  LockGuard lock(mutex_);
  for (AwaitedSignals& signals : wait) {
    uint64_t& taken = taken_[{signals.peer, signals.signal}];
    taken += signals.count;
    signals.count = taken;
  }
}

void Windows::run(const Put& put) {
  Segment& segment = comm_.segment();
  if (segment.hasLeft(put.peer)) {
    try {
      comm_.waiter().checkPeers([&](int rank) { return rank == put.peer; });
    } catch (const NcclError& failure) {
      segment.fail(failure);
    }
  }
  if (segment.failed()) throw segment.failure();
  if (put.bytes != 0) {
    const Comm::Active active(comm_);
    std::byte* const target = put.window->at(put.peer).memory.get() + put.offset;
    const auto* source = static_cast<const std::byte*>(put.data);
    if (put.peer == comm_.rank()) {
      std::memmove(target, source, put.bytes);  // memmove: the source may overlap the window
    } else {
      for (size_t done = 0; done < put.bytes; done += kPiece) {
        if (segment.failed()) throw segment.failure();
        host::copy(target + done, source + done, std::min(kPiece, put.bytes - done));
      }
    }
  }
  if (put.signal == kNoSignal) return;
  segment.signal(comm_.rank(), put.peer, put.signal).fetch_add(1, std::memory_order_acq_rel);
  segment.wakeRank(comm_.rank(), put.peer);
}

void Windows::run(const SignalWait& wait) {
  for (const AwaitedSignals& signals : wait) {
    const auto& sent = comm_.segment().signal(signals.peer, comm_.rank(), signals.signal);
    const auto ready = [&] { return sent.load(std::memory_order_acquire) >= signals.count; };
    if (ready()) continue;
    struct Awaited {
      Windows& windows;
      std::multiset<int>::iterator entry;
      Awaited(Windows& windows, int peer) : windows(windows) {
        LockGuard lock(windows.mutex_);
        entry = windows.awaited_.insert(peer);
      }
      ~Awaited() {
        LockGuard lock(windows.mutex_);
        windows.awaited_.erase(entry);
      }
    } const awaited(*this, signals.peer);
    comm_.waiter().waitForPeer(signals.peer, ready);
  }
}

std::vector<int> Windows::missingRanks() const {
  LockGuard lock(mutex_);
  const std::set<int> peers(awaited_.begin(), awaited_.end());
  return {peers.begin(), peers.end()};
}

namespace {

void checkSignal(const char* operation, int signal, int context, unsigned flags) {
  checkRange(operation, "sigIdx", signal, 0, kSignals - 1);
  checkValue(operation, "ctx", context, context == 0, "0");
  checkValue(operation, "flags", flags, flags == 0, "0");
}

}  // namespace

// The lambdas' parameters have the types that nccl.h gives to the table's entries.
void addWindows(NcclApi& t) {
  t.commWindowRegister = [](auto handle, auto buffer, auto bytes, auto made, auto flags) {
    return withComm(handle, kRegister, [&](const auto& comm) {
      checkPointer(kRegister, "win", made);
      *made = nullptr;
      checkNoGroup(kRegister);
      comm->checkUsable();
      checkBuffer(kRegister, "buff", buffer, bytes);
      // Every flag of NCCL asks for a guarantee that this library always gives.
      constexpr int kStrictOrdering = 0x02;  // NCCL_WIN_STRICT_ORDERING, since NCCL 2.29
      constexpr int kKnown = NCCL_WIN_COLL_SYMMETRIC | kStrictOrdering;
      checkValue(kRegister, "winFlags", flags, (flags & ~kKnown) == 0, "NCCL_WIN_*");
      const auto memory = bytes == 0 ? nullptr : findMemory(buffer, bytes);
      if (bytes != 0 && memory == nullptr) {
        invalidArgument(
            kRegister, "buff is not part of memory that memAlloc returned, which peers can map");
      }
      *made = comm->windows().add(buffer, bytes, memory);
    });
  };

  t.commWindowDeregister = [](auto handle, auto window) {
    return withComm(
        handle, "commWindowDeregister", [&](const auto& comm) { comm->windows().remove(window); });
  };

  t.getPeerDevicePointer = [](auto handle, auto offset, auto peer, auto pointer) {
    return guarded([&] {
      constexpr const char* kName = "getPeerDevicePointer";
      checkPointer(kName, "outPtr", pointer);
      const auto window = Windows::findAnywhere(handle, kName);
      checkRank(kName, "peer", peer, static_cast<int>(window->size()));
      *pointer = window->at(peer).memory.get() + offset;
    });
  };

  t.putSignal = [](auto data, auto count, auto type, auto peer, auto handle, auto offset,
                   auto signal, auto context, auto flags, auto commHandle, auto stream) {
    constexpr const char* kName = "putSignal";
    return withComm(commHandle, kName, [&](const auto& comm) {
      comm->checkUsable();
      checkType(kName, type);
      checkRank(kName, "peer", peer, comm->size());
      checkBuffer(kName, "localbuff", data, count);
      checkSignal(kName, signal == kNoSignal ? 0 : signal, context, flags);
      auto window = comm->windows().find(handle, kName);
      const size_t room = window->at(peer).bytes;
      const size_t size = elementSize(type);
      if (offset > room || count > (room - offset) / size) {
        invalidArgument(
            kName, std::to_string(count) + " elements of " + std::to_string(size) +
                       " bytes at offset " + std::to_string(offset) + " do not fit into the " +
                       std::to_string(room) + " bytes that rank " + std::to_string(peer) +
                       " has registered");
      }
      issue({comm, stream, Put{peer, std::move(window), offset, data, count * size, signal}});
    });
  };

  t.signal = [](auto peer, auto signal, auto context, auto flags, auto handle, auto stream) {
    constexpr const char* kName = "signal";
    return withComm(handle, kName, [&](const auto& comm) {
      comm->checkUsable();
      checkRank(kName, "peer", peer, comm->size());
      checkSignal(kName, signal, context, flags);
      issue({comm, stream, Put{.peer = peer, .signal = signal}});
    });
  };

  t.waitSignal = [](auto count, auto descriptions, auto handle, auto stream) {
    constexpr const char* kName = "waitSignal";
    return withComm(handle, kName, [&](const auto& comm) {
      comm->checkUsable();
      checkValue(kName, "nDesc", count, count >= 1, "1 or more");
      checkPointer(kName, "signalDescs", descriptions);
      SignalWait wait;
      for (const ncclWaitSignalDesc_t& one : std::span(descriptions, count)) {
        checkRank(kName, "peer", one.peer, comm->size());
        checkSignal(kName, one.sigIdx, one.ctx, 0);
        checkValue(kName, "opCnt", one.opCnt, one.opCnt >= 1, "1 or more");
        wait.push_back({one.peer, one.sigIdx, static_cast<uint64_t>(one.opCnt)});
      }
      issue({comm, stream, std::move(wait)});
    });
  };
}

}  // namespace torchcomms_pg::shm
