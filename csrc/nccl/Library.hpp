// The seam: what the project has a library do.
//
// Everything above it communicates through a Library: libnccl (nccl/Libnccl.hpp), shared memory
// (shm/api/Api.hpp) or several hosts (gloo/Api.hpp). connect/ chooses which; others ask what it can
// do.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/Collective.hpp"
#include "nccl/NewerNccl.hpp"

namespace torchcomms_pg {

// What a rank does of one point-to-point message: it sends or receives it.
struct Message {
  bool sending = false;
  void* buffer = nullptr;  // read only when sending
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  int peer = 0;  // when receiving, kAnyPeer accepts the first sender
  int tag = 0;
  // True if the send ends when the message has been received, and not when the buffer may be
  // reused. Beyond a few hundred messages that are not yet received, further ones end as if it were
  // false. The receive of such a message has the same value.
  bool confirmed = false;
  // Called once if the call returns ncclSuccess, when the message has been delivered or has failed:
  // by this call, by moveMessages, or by another call or thread of the library that moves messages.
  // Never called if the call returns an error. Null if the call orders the message on its stream.
  void (*done)(void* context, ncclResult_t result, int peer) noexcept = nullptr;
  void* context = nullptr;
  // True for a message with `done` for which the library wakes no thread, once its peer has all
  // that it needs of this rank: the caller calls moveMessages or serveMessages for the rest.
  bool deferred = false;
};

inline constexpr int kAnyPeer = -1;

// The memory that one rank has registered with a window, mapped in this process.
struct WindowView {
  std::shared_ptr<std::byte> memory;  // keeps the mapping, also after the window's end
  size_t bytes = 0;
};

// How a rank looks for messages from ranks of other hosts while it waits for nothing: a failure,
// which commGetAsyncError then reports, or a request to connect.
struct Probe {
  // Returns true if the ranks that share ring()'s counter must look as well. `thorough` looks for
  // everything, also if nothing seems to be new. May block; call it from one thread; may outlive
  // the communicator.
  std::function<bool(bool thorough)> look;
  // Turn of this rank: the ranks that share ring()'s counter take turns in looking, one second
  // each.
  int turn = 0;
  int turns = 1;
};

// What some libraries cannot do, or not in every version.
enum class Feature {
  // Functions of NCCL.
  severalIds,  // init() from several unique ids
  allocator,   // memAlloc, memFree
  registration,
  windowRegistration,
  windows,  // registration of windows, signals, and the memory of peers
  shrink,
  revoke,
  suspend,
  resume,
  memoryStats,
  // Beyond NCCL.
  barrier,   // CollectiveKind::barrier
  tags,      // messages with tags, from any rank, and with `done`
  deferral,  // published, moveMessages, serveMessages; else a thread of the library moves messages
  fail,
  missingRanks,
  ring,
  probe,  // reads failures, and requests to connect, of ranks on other hosts
};

// For the text of the error that a call raises if the library lacks a feature: NCCL's functions for
// the feature, and the first version of NCCL that has them.
struct Introduced {
  const char* functions;
  const char* version;
};
Introduced introduced(Feature feature);

// Error whose text names what was tried, or the library and its fault, and what to do.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns "2.30.7" for 23007.
std::string versionText(int version);

// A library, for the rest of the process: its threads may outlive every communicator. A method with
// the name of an NCCL function has its parameters and is as thread-safe. A method of a feature that
// the library lacks returns ncclInvalidUsage, or what the body below says.
class Library {
 public:
  Library() = default;
  virtual ~Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  virtual bool has(Feature feature) const = 0;
  // Returns the version as ncclGetVersion reports it, e.g. 23007 for 2.30.7.
  virtual int version() const = 0;
  // Returns the exclusive limit of sigIdx. NCCL guarantees 0 alone.
  virtual int signals() const { return 1; }

  virtual const char* getErrorString(ncclResult_t result) const = 0;
  virtual const char* getLastError(ncclComm_t comm) const = 0;

  // Communicators. init() joins the ranks that share `ids`.
  virtual ncclResult_t getUniqueId(ncclUniqueId*) const { return ncclInvalidUsage; }
  virtual ncclResult_t init(
      ncclComm_t* /*made*/,
      std::span<ncclUniqueId> /*ids*/,
      int /*ranks*/,
      int /*rank*/,
      ncclConfig_t*) const {
    return ncclInvalidUsage;
  }
  virtual ncclResult_t commFinalize(ncclComm_t comm) const = 0;
  virtual ncclResult_t commDestroy(ncclComm_t comm) const = 0;
  virtual ncclResult_t commAbort(ncclComm_t comm) const = 0;
  virtual ncclResult_t commSplit(
      ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) const = 0;
  // Returns the library of a communicator that commSplit made.
  virtual const Library& libraryOf(ncclComm_t) const { return *this; }
  // Does what ncclCommShrink does. Shared memory returns ncclInProgress and makes no communicator
  // if this rank would wait past `deadline` for other remaining ranks; NCCL ignores `deadline`.
  virtual ncclResult_t shrink(
      ncclComm_t,
      std::span<int> /*excluded*/,
      ncclComm_t* /*made*/,
      ncclConfig_t*,
      int /*flags*/,
      std::chrono::steady_clock::time_point /*deadline*/) const {
    return ncclInvalidUsage;
  }
  virtual ncclResult_t commRevoke(ncclComm_t, int) const { return ncclInvalidUsage; }
  virtual ncclResult_t commCount(ncclComm_t comm, int* count) const = 0;
  virtual ncclResult_t commUserRank(ncclComm_t comm, int* rank) const = 0;

  // Failures.
  virtual ncclResult_t commGetAsyncError(ncclComm_t comm, ncclResult_t* error) const = 0;
  // Declares the communicator failed on every rank, by the fault of `ranks` (may be empty). Blocked
  // and later calls return `result`, and getLastError returns `reason`. Callable from any thread at
  // any time; a communicator keeps its first failure.
  virtual ncclResult_t fail(
      ncclComm_t,
      ncclResult_t /*result*/,
      const std::string& /*reason*/,
      const std::vector<int>& /*ranks*/) const {
    return ncclInvalidUsage;
  }
  // Returns the ranks, ascending, that the oldest unfinished operation of `comm` still waits for.
  // During initialization these are the ranks that have not joined; after a failure the ranks at
  // fault, if known. Callable from any thread at any time. Empty without the feature.
  virtual std::vector<int> missingRanks(ncclComm_t) const { return {}; }
  // Returns true if the ranks of missingRanks() certainly have not arrived. If false, they may have
  // arrived and wait for others themselves, or the data they sent is lost on a broken connection.
  virtual bool absenceIsCertain() const { return true; }
  virtual Probe probe(ncclComm_t) const { return {}; }
  // Adds `times` to a counter that the ranks of this host share and poll, and returns the sum.
  // Callable from any thread at any time, also after a failure. 0 without the feature.
  virtual uint64_t ring(ncclComm_t, uint64_t /*times*/) const { return 0; }

  // Operations, in the order of `stream`.
  //
  // Runs a collective. Copies the description, and does not check it.
  virtual ncclResult_t run(
      const Collective& collective, ncclComm_t comm, cudaStream_t stream) const = 0;
  // Sends or receives a message. libnccl matches it by its order alone. Otherwise messages of one
  // pair and tag are matched in issue order; different tags and different peers do not wait for
  // each other. A message with `done` is independent of every stream and may not be part of a
  // group.
  virtual ncclResult_t run(const Message& message, ncclComm_t comm, cudaStream_t stream) const = 0;
  // Runs collectives of one type and one operator in one group, up to the first error.
  virtual ncclResult_t runGrouped(
      std::span<const Collective> collectives, ncclComm_t comm, cudaStream_t stream) const;
  virtual ncclResult_t groupStart() const = 0;
  virtual ncclResult_t groupEnd() const = 0;
  // Calls `body` between groupStart and groupEnd. Ends the group also after an error.
  template <class Body>
  ncclResult_t grouped(const Body& body) const {
    const auto started = groupStart();
    if (started != ncclSuccess) {
      return started;
    }
    const auto result = body();
    const auto ended = groupEnd();
    return result != ncclSuccess ? result : ended;
  }
  // Calls launch(collective) for each in one group, up to the first error.
  template <class Launch>
  ncclResult_t grouped(std::span<const Collective> collectives, const Launch& launch) const {
    return grouped([&] {
      for (const auto& collective : collectives) {
        const auto result = launch(collective);
        if (result != ncclSuccess) {
          return result;
        }
      }
      return ncclSuccess;
    });
  }

  // Returns whether the operation issued last has published all its data for the other ranks, so
  // that they do not wait for the stream to execute it. Call from the thread that issued it.
  virtual bool published(ncclComm_t) const { return false; }
  // Moves messages with `done` in the calling thread until `ended` returns true. Some message's
  // `done` makes it true. Returns earlier if the communicator has failed or a signal interrupts the
  // thread.
  virtual void moveMessages(ncclComm_t, const std::function<bool()>& /*ended*/) const {}
  // Has a thread of the library move all messages that were deferred.
  virtual void serveMessages(ncclComm_t) const {}

  // Memory.
  virtual ncclResult_t memAlloc(void**, size_t) const { return ncclInvalidUsage; }
  virtual ncclResult_t memFree(void*) const { return ncclInvalidUsage; }
  virtual ncclResult_t commRegister(ncclComm_t, void*, size_t, void**) const {
    return ncclInvalidUsage;
  }
  virtual ncclResult_t commDeregister(ncclComm_t, void*) const { return ncclInvalidUsage; }
  virtual ncclResult_t commSuspend(ncclComm_t, int) const { return ncclInvalidUsage; }
  virtual ncclResult_t commResume(ncclComm_t) const { return ncclInvalidUsage; }
  virtual ncclResult_t commMemStats(ncclComm_t, ncclCommMemStat_t, uint64_t*) const {
    return ncclInvalidUsage;
  }

  // Windows.
  virtual ncclResult_t commWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) const {
    return ncclInvalidUsage;
  }
  virtual ncclResult_t commWindowDeregister(ncclComm_t, ncclWindow_t) const {
    return ncclInvalidUsage;
  }
  // Puts data without a signal into the window of a peer, in host memory.
  virtual ncclResult_t put(
      const void* /*data*/,
      size_t /*count*/,
      ncclDataType_t,
      int /*peer*/,
      ncclWindow_t,
      size_t /*offset*/,
      ncclComm_t,
      cudaStream_t) const {
    return ncclInvalidUsage;
  }
  virtual ncclResult_t signal(int, int, int, unsigned int, ncclComm_t, cudaStream_t) const {
    return ncclInvalidUsage;
  }
  virtual ncclResult_t waitSignal(int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t) const {
    return ncclInvalidUsage;
  }
  virtual ncclResult_t getPeerDevicePointer(ncclWindow_t, size_t, int, void**) const {
    return ncclInvalidUsage;
  }
  // Sets `view` to the memory of `peer` in a window of host memory. Callable from any thread.
  virtual ncclResult_t windowView(
      ncclComm_t, ncclWindow_t, int /*peer*/, WindowView& /*view*/) const {
    return ncclInvalidUsage;
  }
};

}  // namespace torchcomms_pg
