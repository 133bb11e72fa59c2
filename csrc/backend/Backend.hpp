// The c10d backend "torchcomms": translates c10d's calls into calls of a Communicator.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/GroupOptions.hpp"
#include "base/ByThread.hpp"
#include "base/Mutex.hpp"
#include "base/TorchCompat.hpp"
#include "comm/Communicator.hpp"
#include "handle/OwnProcess.hpp"
#include "host/LongLock.hpp"
#include "nccl/Allocator.hpp"

namespace torchcomms_pg {

// Returns the options of an operation that c10d gives.
inline Communicator::Options optionsOf(bool async, Milliseconds timeout) {
  const bool unset = timeout == c10d::kUnsetTimeout;
  return {.async = async, .timeout = unset ? std::nullopt : std::optional(timeout)};
}

// Implements c10d::Backend. CPU tensors go over shared memory, and over Gloo between hosts. Tensors
// of an accelerator go over a communicator for their device. The first such tensor makes the
// communicator, which is collective over the group. Behaves like ProcessGroupNCCL in the functions
// that both have. A call with asyncOp false returns when the operation has finished or, on an
// accelerator, is queued; its Work is null without timing. Thread-safe.
class Backend final : public latest::Backend {
 public:
  using TensorList = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using CommPtr = std::shared_ptr<Communicator>;

  // Joins the ranks of the group; collective. Raises CommError if not all ranks arrive within the
  // timeout of `options`. With `options->enable_reconfigure` no rank joins before reconfigure().
  Backend(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      c10::intrusive_ptr<GroupOptions> options);
  // Wraps a communicator that a caller owns and ends; shutdown() of the group does not end it. A
  // communicator has one such group at a time.
  Backend(CommPtr comm, c10::intrusive_ptr<GroupOptions> options);
  ~Backend() override;

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }

  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override {
    // Without coalescing c10d returns a Work for each message of a batch, as it does over Gloo.
    return options_->backend != "gloo";
  }
  bool supportsShrinking() const override { return true; }

  // Collectives (Collectives.cpp).
  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(
      TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(
      std::vector<TensorList>& outputs, TensorList& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      std::vector<TensorList>& outputs, TensorList& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single_coalesced(
      TensorList& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(
      std::vector<TensorList>& outputs, TensorList& inputs,
      const c10d::GatherOptions& opts) override;
  WorkPtr scatter(
      TensorList& outputs, std::vector<TensorList>& inputs,
      const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(
      TensorList& outputs, std::vector<TensorList>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single_coalesced(
      TensorList& outputs, TensorList& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr all_to_all_single(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputSplits,
      std::vector<int64_t>& inputSplits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(
      TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;
  WorkPtr gather_single(
      at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;

  WorkPtr send(TensorList& tensors, int destination, int tag) override;
  WorkPtr recv(TensorList& tensors, int source, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Groups (Split.cpp) and lifecycle (Backend.cpp).
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& excluded, int flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank,
      const int& size) override;
  uint64_t splitCount() const { return splits_; }

  void setSequenceNumberForGroup() override {}  // numbers start at 0 on all ranks
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  bool isInitialized() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void enableCollectivesTiming() override;
  // Sets whether operations whose input contains NaN raise.
  void enableNanCheck(bool enable);
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Memory of accelerators (Memory.cpp).
  //
  // Registers those segments of one of torch's memory pools that are not registered yet, so that
  // the library uses them in place. The registration ends when a segment is freed or the
  // communicator is closed. `symmetric`: the segments have the same layout on all ranks; the call
  // is then collective.
  void registerPool(
      Registrations::Pool pool,
      const std::map<int, std::vector<PoolSegment>>& segments,  // by device index
      bool symmetric);
  // Ends the registration of a pool. Raises ValueError if the pool was not registered.
  void deregisterPool(Registrations::Pool pool);
  // suspend() waits for all operations in flight, then frees the library's memory on the devices.
  // resume() allocates it again. In between, operations raise. Both functions are collective.
  void suspend() override;
  void resume() override;
  // Returns numbers of bytes, summed over this rank's devices: "suspend" for what suspend() frees,
  // "persist" for what it keeps, "total" for both. "suspended" is 1 after suspend(). Callable while
  // suspended, too.
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;

  // Replaces this group's communicators by a new one (Reconfigure.cpp). The call names its members,
  // of which there may be more or fewer than before. Collective over the new members: returns a
  // finished Work when all have arrived. Operations in flight on the old communicators fail. After
  // an error the group is unchanged. Do not split, shrink or merge the group meanwhile.
  bool supportsReconfigure() const override { return store_ != nullptr; }
  latest::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const latest::ReconfigureOptions& opts) override;

  bool supportsWindow() const override;
  c10::intrusive_ptr<latest::Window> new_window(const std::optional<at::Tensor>& tensor) override;
  void registerAbortHook(int64_t id, latest::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, latest::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
  bool supportsAbortHooks() const override { return true; }

  // Returns the communicator for CPU tensors. Raises if none exists.
  CommPtr cpuCommunicator(const char* what) const;

  // Returns NCCL's communicator of the group's accelerator, for code that calls NCCL; with several
  // devices, the current device's. Raises if none exists.
  int64_t commPtr();

  // Returns this group's number among the groups of this process.
  uint64_t uid() const { return uid_; }

  // Returns the communicator for tensors of the device; the first call for an accelerator makes it.
  // `peer`: the other rank of a message. If the other ranks of the group do not arrive soon, the
  // two ranks of the message make a communicator for themselves and keep it for their messages.
  CommPtr communicator(const char* what, at::Device device, std::optional<int> peer = std::nullopt);

 private:
  // Makes a shrunk group from communicators that shrink() has made.
  Backend(
      c10::intrusive_ptr<c10d::Store> store, const std::vector<CommPtr>& comms, int rank, int size,
      c10::intrusive_ptr<GroupOptions> options);

  void start();
  void logOptions() const;
  std::vector<Peer> peersOfOtherGroups() const;
  void forgetPeers();
  // Returns null before the first reconfigure(), and in a group that wraps an accelerator's
  // communicator.
  CommPtr cpu() const;
  // Raises if the group cannot be used; called before each use. The first call adds the process's
  // recorder, since torch sets a group's description only after it has made the group.
  void prepare(const char* what) const;
  void record(Communicator& comm) const;
  // Removes this group's hooks from the communicators, and releases the dump pipe. Has an effect
  // once.
  void detach();
  void letObserverGo();
  void installGroupHooks(Communicator& comm) const REQUIRES(hooksMutex_);
  void installNanCheck(Communicator& comm) REQUIRES(hooksMutex_);
  // Chooses the communicator by the tensor's device.
  CommPtr route(const char* what, const at::Tensor& tensor);
  // Does the same for a message to or from `peer`, alone or in a batch.
  CommPtr routeMessage(const char* what, const at::Tensor& tensor, int peer);
  bool inBatch();
  // Adds a communicator to those that route() and communicator() find, unless the group has been
  // ended since `ends_` was `before`. Returns whether it did.
  bool keep(const CommPtr& comm, std::optional<uint64_t> before = std::nullopt);
  // Applies the group's options to a communicator that it has made.
  void configure(Communicator& comm) const;
  // Takes creation_. Raises RuntimeError if a signal handler calls `what` in the middle of the
  // first operation on an accelerator. `hurry`: fails the rendezvous of another thread that holds
  // the lock.
  LongLock::Held holdCreation(const char* what, bool hurry = false) ACQUIRE(creation_);
  // Returns all existing communicators, including the pairs' communicators. Empty in a forked
  // child.
  std::vector<CommPtr> communicators() const;
  // Returns the device's communicator of this rank and `peer` if it exists, else the device's
  // communicator of all ranks, or null.
  CommPtr find(at::Device device, std::optional<int> peer) const REQUIRES(communicatorsMutex_);
  // Returns the accelerator's communicator, or with several devices the current device's. Null if
  // none exists.
  CommPtr accelerator() const;
  std::optional<at::Device> barrierDevice(const c10d::BarrierOptions& opts) const;
  CommPtr barrierCommunicator(const c10d::BarrierOptions& opts);
  // Returns the accelerators' communicators. Raises if none exists, or if the handler of a signal
  // calls `what` in the middle of a call in one of them.
  std::vector<CommPtr> accelerators(const char* what) const;
  // Raises CommError if the group has been ended since `ends_` was `before`.
  CommPtr newCommunicator(at::Device device, std::optional<int> peer, uint64_t before)
      REQUIRES(creation_);
  void installHooks(Communicator& comm);
  // Applies the group's hooks and settings to a new communicator. Call it after keep(), so that
  // later changes also reach the communicator.
  void adopt(Communicator& comm);
  // Calls `body` and returns its Work, or null for a synchronous operation in a batch. If `body`
  // raises, drops the calling thread's batch.
  template <class Body>
  WorkPtr issue(const CommPtr& comm, bool async, Body&& body);
  // Does so with a function of `collectives`, on the communicator for `tensor`.
  template <class Opts, class Collective, class... Args>
  WorkPtr issue(
      const char* what, const at::Tensor& tensor, const Opts& opts, Collective collective,
      const Args&... args);
  // Launches the operations of the kind `parts` that `each` issues, one for each of `inputs`, as
  // one batch. In an open batch they become part of that batch.
  template <class Each>
  WorkPtr together(
      const char* what, bool async, OpKind parts, const TensorList& inputs, const Each& each);
  // Copies `opts`, or this group's options if `opts` is null.
  c10::intrusive_ptr<GroupOptions> childOptions(
      const c10::intrusive_ptr<c10d::Backend::Options>& opts, const char* what) const;
  // Returns the name in the options, unless that is this group's own name. Then forms a name from
  // `how` and the members, which is the same on all members and differs from earlier children's.
  std::string childName(const GroupOptions& options, const char* how);
  void noteChild(const GroupOptions& options);
  // Messages of this rank to itself that a batch keeps until its end.
  struct SelfSend {
    std::vector<at::Tensor> sent;
    std::vector<at::Tensor> received;
    std::vector<c10::Stream> streams;  // in which the messages were issued
    bool empty() const { return sent.empty() && received.empty(); }
  };
  // Ends the calling thread's batch, if one is open. Returns the messages that the batch kept.
  SelfSend endBatch();
  // Keeps a message of an open batch from this rank to itself if its device has no communicator:
  // making one would need all ranks. endCoalescing() then copies the message. Returns whether the
  // message was kept.
  bool selfSend(const at::Tensor& tensor, int peer, bool sends);
  void checkSelfSend(const SelfSend& kept) const;
  // Copies the kept messages. Returns the Work of the copies, or null if no messages were kept.
  WorkPtr copySelfSend(const SelfSend& kept) const;
  // Drops the operations that the calling thread has batched.
  void dropBatches();
  std::vector<int64_t> globalRanks() const;
  std::string members() const;  // returns the global ranks, as a key

  static inline std::atomic<uint64_t> groups_{0};
  const uint64_t uid_ = groups_++;
  const OwnProcess process_;
  const c10::intrusive_ptr<GroupOptions> options_;
  // Store of the rendezvous. Null if the communicators came from a TorchComm, or from shrinking
  // such a group; this group then makes no further communicators.
  const c10::intrusive_ptr<c10d::Store> store_;
  // Key of the ranks in the store; also set by reconfigure().
  std::string members_ GUARDED_BY(creation_);
  // Ranks' processes; empty if the constructor did not join them.
  std::vector<Peer> peers_ GUARDED_BY(creation_);
  LongLock creation_;  // held during a rendezvous for a device
  mutable Mutex communicatorsMutex_;
  CommPtr cpu_ GUARDED_BY(communicatorsMutex_);  // replaced by reconfigure()
  // In the order of creation, the same on all ranks.
  std::vector<CommPtr> accelerators_ GUARDED_BY(communicatorsMutex_);
  // By device and peer.
  std::map<std::pair<at::DeviceIndex, int>, CommPtr> pairs_ GUARDED_BY(communicatorsMutex_);
  // Number of calls of abort(), shutdown() and reconfigure(), each of which fails a rendezvous for
  // a device that is under way. Incremented before such a call looks for communicators.
  std::atomic<uint64_t> ends_{0};
  std::atomic<bool> closed_{false};
  std::atomic<bool> timing_{false};
  Mutex batchMutex_ ACQUIRED_BEFORE(communicatorsMutex_);
  ByThread<SelfSend> batches_ GUARDED_BY(batchMutex_);  // open batches, by thread
  mutable std::once_flag recording_;
  mutable std::atomic<bool> recorded_{false};
  Mutex observedMutex_;
  std::shared_ptr<void> observed_ GUARDED_BY(observedMutex_);  // from ProcessObserver::hold()
  const bool borrowed_ = false;
  std::atomic<bool> detached_{false};
  std::atomic<uint64_t> splits_{0};
  Mutex childrenMutex_;
  // Names of the groups made from this one.
  std::set<std::string> children_ GUARDED_BY(childrenMutex_);
  Mutex hooksMutex_ ACQUIRED_BEFORE(communicatorsMutex_);
  std::shared_ptr<WorkerStream> completionHooks_ GUARDED_BY(hooksMutex_);
  // Hooks are shared pointers: copying or destroying a hook may need the GIL, and no thread may
  // wait for the GIL while it holds hooksMutex_.
  template <class Hook>
  using Shared = std::shared_ptr<const Hook>;
  template <class Hook>
  using SharedById = std::map<int64_t, Shared<Hook>>;
  // Sets the hook `id`, or removes it if `hook` is null.
  template <class Hook>
  void setHook(SharedById<Hook> Backend::* hooks, int64_t id, Shared<Hook> hook);
  Shared<std::function<void(std::shared_ptr<c10d::WorkInfo>)>> onCompletion_
      GUARDED_BY(hooksMutex_);
  bool nanCheck_ GUARDED_BY(hooksMutex_) = false;
  std::vector<std::pair<std::weak_ptr<Hooks>, Hooks::Id>> nanChecks_ GUARDED_BY(hooksMutex_);
  SharedById<latest::AbortHook> abortHooks_ GUARDED_BY(hooksMutex_);
  LongLock reconfiguration_;  // held during reconfigure()
  // uuids of all calls of reconfigure().
  std::set<int64_t> uuids_ GUARDED_BY(reconfiguration_);
  const std::string handle_ = newHandle(getRank());
  static std::string newHandle(int rank);
  SharedById<latest::CompletionHook> hooksOfCompletion_ GUARDED_BY(hooksMutex_);
};

}  // namespace torchcomms_pg
