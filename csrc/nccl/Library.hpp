// The seam between this project and the libraries that communicate for it.
//
// All code above communicates through a Library: libnccl (nccl/Libnccl.hpp), shared memory
// (shm/api/Api.hpp) or several hosts (gloo/Api.hpp). connect/ chooses the library. Other code does
// not distinguish libraries, but asks what a library has().
#pragma once

#include <chrono>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "nccl/Collective.hpp"
#include "nccl/NcclApi.hpp"

namespace c10d {
class Store;
}

namespace torchcomms_pg {

// One rank's side of a point-to-point message: its send or its receive.
struct Message {
  bool sending = false;
  void* buffer = nullptr;  // a send only reads it
  size_t count = 0;
  ncclDataType_t type = ncclInt8;
  int peer = 0;  // a receive with kAnyPeer takes the first message to arrive
  int tag = 0;
  // True if the send ends only when the message has been received; else it ends when the buffer may
  // be reused. Shared memory confirms up to 512 messages to a peer at a time; any further send ends
  // as if this were false. The send and its receive have the same value.
  bool confirmed = false;
  // Called once, if run() returns ncclSuccess, when the send or receive has ended or failed: inside
  // run(), moveMessages() or another call that moves messages, or in a thread of the library. Not
  // called if run() returns an error. Null if the message runs in the order of the stream.
  void (*done)(void* context, ncclResult_t result, int peer) noexcept = nullptr;
  void* context = nullptr;
  // True if the library wakes no thread for the message once the peer needs nothing more from this
  // rank. The caller calls moveMessages() or serveMessages() for the rest. Requires `done`.
  bool deferred = false;
};

inline constexpr int kAnyPeer = -1;

// The memory that one rank has registered with a window, mapped in this process.
struct WindowView {
  std::shared_ptr<std::byte> memory;  // keeps the memory mapped, even after the window's end
  size_t bytes = 0;
};

// How the ranks of a group on several hosts notify each other of news: a failure, or a request to
// connect. The functions may be called from any thread, and after the communicator's end.
struct Announcements {
  // Makes all ranks of the group look for news, which is in the job's store already. May block, and
  // raises the store's errors.
  std::function<void()> announce;
  // Calls the function with the job's store, in the calling thread, over a connection in which no
  // thread of the program blocks. May block, and raises the store's errors.
  std::function<void(const std::function<void(c10d::Store& job)>&)> call;
  // Returns by how much more than a second a rank may look late.
  std::function<std::chrono::milliseconds()> slack;
};

// Abilities that some libraries, or some versions of libnccl, lack.
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
  tags,      // messages with a tag or with `done`; receives from any rank
  deferral,  // published, moveMessages, serveMessages; else a thread of the library moves messages
  fail,
  missingRanks,
  ring,
  probe,  // heeds announcements of failures, and of requests to connect
};

// NCCL's functions for a feature and the first version of NCCL that has them, for the text of
// errors. Both are empty if no call raises an error for lack of the feature.
struct Introduced {
  const char* functions;
  const char* version;
};
Introduced introduced(Feature feature);

// Error of a library that cannot be loaded or used. The text says what was tried, or names the
// library and its fault, and says what to do.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns "2.30.7" for 23007.
std::string versionText(int version);

// A library. It is never destroyed, since its threads may outlive every communicator. A method with
// the name of an NCCL function has that function's parameters and is as thread-safe. The bodies
// below call the function in the table, and return ncclInvalidUsage if the table lacks it; a method
// of a feature beyond NCCL does what its body says.
class Library {
 public:
  // `beyond`: features that are not NCCL's.
  explicit Library(const NcclApi& table = {}, std::initializer_list<Feature> beyond = {});
  virtual ~Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  bool has(Feature feature) const;
  // Returns the version as ncclGetVersion reports it, e.g. 23007 for 2.30.7.
  virtual int version() const;
  // Returns the number of signals: sigIdx is less. NCCL guarantees only sigIdx 0.
  virtual int signals() const { return 1; }

  virtual const char* getErrorString(ncclResult_t result) const {
    return table_.getErrorString(result);
  }
  virtual const char* getLastError(ncclComm_t comm) const { return table_.getLastError(comm); }

  // Communicators. init() makes the communicator of the ranks that pass equal `ids`.
  ncclResult_t getUniqueId(ncclUniqueId* id) const { return call(table_.getUniqueId, id); }
  ncclResult_t init(
      ncclComm_t* made, std::span<ncclUniqueId> ids, int ranks, int rank,
      ncclConfig_t* config) const;
  virtual ncclResult_t commFinalize(ncclComm_t comm) const {
    return call(table_.commFinalize, comm);
  }
  virtual ncclResult_t commDestroy(ncclComm_t comm) const { return call(table_.commDestroy, comm); }
  virtual ncclResult_t commAbort(ncclComm_t comm) const { return call(table_.commAbort, comm); }
  virtual ncclResult_t commSplit(
      ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) const {
    return call(table_.commSplit, comm, color, key, made, config);
  }
  // Returns the library of a communicator that commSplit made; gloo/ may make one of shared memory.
  virtual const Library& libraryOf(ncclComm_t) const { return *this; }
  // Does what ncclCommShrink does. Shared memory returns ncclInProgress and makes no communicator
  // if this rank would wait past `deadline` for other remaining ranks; NCCL ignores `deadline`.
  virtual ncclResult_t shrink(
      ncclComm_t comm, std::span<int> excluded, ncclComm_t* made, ncclConfig_t* config, int flags,
      std::chrono::steady_clock::time_point deadline) const;
  ncclResult_t commRevoke(ncclComm_t comm, int flags) const {
    return call(table_.commRevoke, comm, flags);
  }
  virtual ncclResult_t commCount(ncclComm_t comm, int* count) const {
    return call(table_.commCount, comm, count);
  }
  virtual ncclResult_t commUserRank(ncclComm_t comm, int* rank) const {
    return call(table_.commUserRank, comm, rank);
  }

  // Failures.
  virtual ncclResult_t commGetAsyncError(ncclComm_t comm, ncclResult_t* error) const {
    return call(table_.commGetAsyncError, comm, error);
  }
  // Declares the communicator failed on every rank, by the fault of `ranks` (may be empty). Blocked
  // and later calls return `result`, and getLastError returns `reason`. Callable from any thread at
  // any time; a communicator keeps its first failure.
  virtual ncclResult_t fail(
      ncclComm_t, ncclResult_t /*result*/, const std::string& /*reason*/,
      const std::vector<int>& /*ranks*/) const {
    return ncclInvalidUsage;
  }
  // Returns the ranks, ascending, for which `comm` waits: in its collective if one runs, otherwise
  // in calls of windows, otherwise in its oldest message. During initialization these are the ranks
  // that have not joined; after a failure the ranks at fault, if known. Callable from any thread at
  // any time. Returns no ranks without the feature.
  virtual std::vector<int> missingRanks(ncclComm_t) const { return {}; }
  // Returns true if the ranks of missingRanks() certainly have not arrived. If false, they may have
  // arrived and wait for other ranks, or their data is lost on a broken connection.
  virtual bool absenceIsCertain() const { return true; }
  // Announces news by `by` from now on. Returns the function that looks for news of other ranks,
  // among them news from before this call. commGetAsyncError then reports a failure. It may block,
  // raises the store's errors, and may be called after the communicator's end, from one thread at a
  // time.
  virtual std::function<void()> probe(ncclComm_t, Announcements /*by*/) const { return {}; }
  // Adds `times` to a counter that the ranks of this host share and poll, and returns the sum.
  // Callable from any thread at any time, also after a failure. Returns 0 without the feature.
  virtual uint64_t ring(ncclComm_t, uint64_t /*times*/) const { return 0; }

  // Operations, in the order of `stream`.
  //
  // Runs a collective. Copies its description. Only libnccl may check the arguments. In place of
  // ncclAlltoAll, ncclGather or ncclScatter, if the table lacks them, sends and receives messages
  // in one group, as NCCL's documentation shows. NCCL lacks a barrier: callers reduce one element
  // instead.
  virtual ncclResult_t run(
      const Collective& collective, ncclComm_t comm, cudaStream_t stream) const;
  // Sends or receives a message. libnccl matches a pair's messages by their order alone. Other
  // libraries match messages of one pair and one tag in issue order; messages of different tags or
  // peers do not wait for each other. A message with `done` is independent of every stream and may
  // not be part of a group.
  virtual ncclResult_t run(const Message& message, ncclComm_t comm, cudaStream_t stream) const;
  virtual ncclResult_t groupStart() const { return table_.groupStart(); }
  virtual ncclResult_t groupEnd() const { return table_.groupEnd(); }
  // Calls `body` between groupStart and groupEnd, and returns the first error. Ends the group even
  // after an error of `body`.
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
  // Calls launch() for each of `calls` in one group. Stops at the first error.
  template <class Calls, class Launch>
  ncclResult_t grouped(const Calls& calls, const Launch& launch) const {
    return grouped([&] {
      for (const auto& call : calls) {
        const auto result = launch(call);
        if (result != ncclSuccess) {
          return result;
        }
      }
      return ncclSuccess;
    });
  }

  // Returns whether the last issued operation has published all its data: if so, the other ranks do
  // not wait for the stream to execute it. Call from the thread that issued the operation.
  virtual bool published(ncclComm_t) const { return false; }
  // Moves messages with `done` in the calling thread until `ended` returns true: a message's `done`
  // makes it true. Returns earlier after a failure, or if a signal interrupts the thread.
  virtual void moveMessages(ncclComm_t, const std::function<bool()>& /*ended*/) const {}
  // Makes a thread of the library move all deferred messages.
  virtual void serveMessages(ncclComm_t) const {}

  // Memory.
  ncclResult_t memAlloc(void** pointer, size_t size) const {
    return call(table_.memAlloc, pointer, size);
  }
  ncclResult_t memFree(void* pointer) const { return call(table_.memFree, pointer); }
  ncclResult_t commRegister(ncclComm_t comm, void* buffer, size_t size, void** handle) const {
    return call(table_.commRegister, comm, buffer, size, handle);
  }
  ncclResult_t commDeregister(ncclComm_t comm, void* handle) const {
    return call(table_.commDeregister, comm, handle);
  }
  ncclResult_t commSuspend(ncclComm_t comm, int flags) const {
    return call(table_.commSuspend, comm, flags);
  }
  ncclResult_t commResume(ncclComm_t comm) const { return call(table_.commResume, comm); }
  ncclResult_t commMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) const {
    return call(table_.commMemStats, comm, stat, value);
  }

  // Windows.
  ncclResult_t commWindowRegister(
      ncclComm_t comm, void* buffer, size_t size, ncclWindow_t* window, int flags) const {
    return call(table_.commWindowRegister, comm, buffer, size, window, flags);
  }
  ncclResult_t commWindowDeregister(ncclComm_t comm, ncclWindow_t window) const {
    return call(table_.commWindowDeregister, comm, window);
  }
  // Puts data into a peer's window of host memory, without a signal.
  virtual ncclResult_t put(
      const void* /*data*/, size_t /*count*/, ncclDataType_t, int /*peer*/, ncclWindow_t,
      size_t /*offset*/, ncclComm_t, cudaStream_t) const {
    return ncclInvalidUsage;
  }
  ncclResult_t signal(
      int peer, int index, int context, unsigned int flags, ncclComm_t comm,
      cudaStream_t stream) const {
    return call(table_.signal, peer, index, context, flags, comm, stream);
  }
  ncclResult_t waitSignal(
      int count, ncclWaitSignalDesc_t* all, ncclComm_t comm, cudaStream_t stream) const {
    return call(table_.waitSignal, count, all, comm, stream);
  }
  ncclResult_t getPeerDevicePointer(
      ncclWindow_t window, size_t offset, int peer, void** pointer) const {
    return call(table_.getPeerDevicePointer, window, offset, peer, pointer);
  }
  // Sets `view` to the memory that `peer` has registered, in host memory. Callable from any thread.
  virtual ncclResult_t windowView(
      ncclComm_t, ncclWindow_t, int /*peer*/, WindowView& /*view*/) const {
    return ncclInvalidUsage;
  }

 protected:
  NcclApi table_;

 private:
  template <class... Arguments>
  static ncclResult_t call(
      ncclResult_t (*function)(Arguments...), std::type_identity_t<Arguments>... arguments) {
    return function == nullptr ? ncclInvalidUsage : function(arguments...);
  }

  uint32_t beyond_ = 0;  // bits of features
};

}  // namespace torchcomms_pg
