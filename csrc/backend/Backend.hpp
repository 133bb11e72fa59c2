// The c10d backend "torchcomms": translates c10d's calls into those of a Communicator.
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
#include "base/TorchCompat.hpp"
#include "comm/Communicator.hpp"
#include "comm/OwnProcess.hpp"
#include "recorder/DumpPipe.hpp"

namespace torchcomms_pg {

// Implements c10d::Backend. CPU tensors go over shared memory, between hosts over Gloo. Tensors of
// an accelerator go over a communicator for their device, which the first of them makes; every rank
// of the group takes part in that. Follows ProcessGroupNCCL where the two can be compared; a call
// with asyncOp false returns a null Work when the operation has finished. Thread-safe.
class Backend final : public latest::Backend {
 public:
  using TensorList = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using CommPtr = std::shared_ptr<Communicator>;

  // Joins the ranks of the group, which is collective over them. Raises CommError when not all of
  // them come within the timeout of `options`. With `options->enable_reconfigure` no ranks join
  // before reconfigure().
  Backend(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<GroupOptions> options);
  // Wraps a communicator that belongs to a caller, who ends it. Shutting the group down leaves it
  // as it is. A communicator has one such group at a time.
  Backend(CommPtr comm, c10::intrusive_ptr<GroupOptions> options);
  ~Backend() override;

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }

  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override {
    // c10d returns one work for each message of a batch over Gloo, for which it does not ask.
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
      std::vector<TensorList>& outputs,
      TensorList& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      std::vector<TensorList>& outputs,
      TensorList& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single_coalesced(
      TensorList& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(
      std::vector<TensorList>& outputs,
      TensorList& inputs,
      const c10d::GatherOptions& opts) override;
  WorkPtr scatter(
      TensorList& outputs,
      std::vector<TensorList>& inputs,
      const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(
      TensorList& outputs,
      std::vector<TensorList>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single_coalesced(
      TensorList& outputs, TensorList& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr all_to_all_single(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& outputSplits,
      std::vector<int64_t>& inputSplits,
      const c10d::AllToAllOptions& opts) override;
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

  // Groups and life (Backend.cpp).
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& excluded,
      int flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts,
      const int& rank,
      const int& size) override;
  uint64_t splitCount() const { return splits_; }

  void setSequenceNumberForGroup() override {}  // numbers start at 0 everywhere
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  bool isInitialized() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void enableCollectivesTiming() override;
  // Sets whether operations that would send NaN are refused.
  void enableNanCheck(bool enable);
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Memory of accelerators (Memory.cpp): see comm/Memory.hpp. With several devices of one rank the
  // statistics are sums.
  void registerPool(
      Registrations::Pool pool,
      const std::map<int, std::vector<Segment>>& segments,  // by device index
      bool symmetric);
  void deregisterPool(Registrations::Pool pool);
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;

  // Replaces this group's communicator by one of the members that the call names, which may be more
  // or fewer (Reconfigure.cpp). Collective over them; returns when all have come, with a finished
  // Work. What is in flight on the old communicator fails. After an error the group is as it was.
  // Make no groups of this one meanwhile.
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

  // Returns the communicator for CPU tensors; raises where there is none.
  CommPtr cpuCommunicator(const char* what) const;

  // Returns NCCL's communicator of the group's accelerator, for code that calls NCCL itself; where
  // there are several devices, that of the current one. Raises where there is none.
  int64_t commPtr();

  // Returns this group's number among the groups of this process.
  uint64_t uid() const { return uid_; }

  // Returns the communicator for tensors of the device; makes it where it is an accelerator's and
  // there is none yet. `peer`: the rank that a message of this one is for or from. The two of them
  // then get one of their own where not all ranks of the group come soon, and keep to it.
  CommPtr communicator(const char* what, at::Device device, std::optional<int> peer = std::nullopt);

 private:
  // Makes a shrunk group, whose communicators are there already.
  Backend(
      c10::intrusive_ptr<c10d::Store> store,
      const std::vector<CommPtr>& comms,
      int rank,
      int size,
      c10::intrusive_ptr<GroupOptions> options);

  void start();
  void logOptions() const;
  std::vector<Peer> peersOfOtherGroups() const;
  void forgetPeers();
  // Returns null before the first reconfigure(), and in a group that was made of an accelerator's
  // communicator.
  CommPtr cpu() const;
  // Checks that the group can be used, before each use. Recording starts with the first: torch
  // describes a group after it has made it.
  void prepare(const char* what) const;
  void record(Communicator& comm) const;
  // Makes the communicators call nothing of this group any more.
  void detach();
  void releaseDumpPipe();
  void installAbortHooks(Communicator& comm) const;
  void installEndHook(Communicator& comm) const;
  void installNanCheck(Communicator& comm);
  // Chooses the communicator by the tensor's device.
  CommPtr route(const char* what, const at::Tensor& tensor);
  // Does so for a message alone, or one of a batch, to or from `peer`.
  CommPtr routeMessage(const char* what, const at::Tensor& tensor, int peer);
  bool inBatch();
  // Enters a communicator where route() and communicator() find it.
  void keep(CommPtr comm);
  // Returns the communicators that exist, those for messages of two ranks among them; none in a
  // forked child.
  std::vector<CommPtr> communicators() const;
  // Returns the communicator of all ranks for the device, of two ranks, or null. Call with
  // communicatorsMutex_ held.
  CommPtr find(at::Device device, std::optional<int> peer) const;
  // Returns the accelerator's communicator, of several that of the current device; null: neither
  // exists.
  CommPtr accelerator() const;
  std::optional<at::Device> barrierDevice(const c10d::BarrierOptions& opts) const;
  CommPtr barrierCommunicator(const c10d::BarrierOptions& opts);
  // Returns the accelerators' communicators; raises where there are none.
  std::vector<CommPtr> accelerators(const char* what) const;
  CommPtr newCommunicator(at::Device device, std::optional<int> peer);
  void installHooks(Communicator& comm);
  // Gives a new communicator what the group has been asked for. Call it when communicators() has
  // the new one, so that later requests reach it.
  void adopt(Communicator& comm);
  // Calls `body`; an operation that throws leaves no batch open.
  template <class Body>
  WorkPtr issue(const CommPtr& comm, bool async, Body&& body);
  // Launches all that `body` issues together: operations of the kind `parts`, of `inputs`.
  template <class Body>
  WorkPtr together(
      const CommPtr& comm, bool async, OpKind parts, const TensorList& inputs, Body&& body);
  // Copies `opts`, or where there are none, this group's options.
  c10::intrusive_ptr<GroupOptions> childOptions(
      const c10::intrusive_ptr<c10d::Backend::Options>& opts, const char* what) const;
  // Returns the name in the options; where that is this group's own, one after `how` and the
  // members, which is the same on all of these, and that no child had before.
  std::string childName(const GroupOptions& options, const char* how);
  void noteChild(const GroupOptions& options);
  // The messages to this rank itself that a batch has kept.
  struct ToMyself {
    std::vector<at::Tensor> sent;
    std::vector<at::Tensor> received;
    bool empty() const { return sent.empty() && received.empty(); }
  };
  // Ends the calling thread's batch, if it has one open.
  ToMyself endBatch();
  // Returns whether it keeps the message, to copy it when the batch ends: one of a batch, to this
  // rank itself, on a device without a communicator, whose making would take all ranks.
  bool keptForMyself(const at::Tensor& tensor, int peer, bool sends);
  // Copies them. Null: there are none.
  WorkPtr copyToMyself(const ToMyself& kept) const;
  // Drops the operations that the calling thread has collected.
  void dropBatches();
  std::vector<int64_t> globalRanks() const;
  std::string members() const;  // returns the global ranks, as a key

  static uint64_t nextUid();

  const uint64_t uid_ = nextUid();
  const OwnProcess process_;
  const c10::intrusive_ptr<GroupOptions> options_;
  // Store of the rendezvous. Null: the communicators are those of a TorchComm, or shrunk of one,
  // and no more are made.
  const c10::intrusive_ptr<c10d::Store> store_;
  std::string members_;       // key of the ranks in the store; set by reconfigure(), too
  std::vector<Peer> peers_;   // ranks' processes; empty where cpu_ was made elsewhere
  std::mutex creationMutex_;  // held during a rendezvous for a device
  mutable std::mutex communicatorsMutex_;  // guards the next three
  CommPtr cpu_;                            // replaced by reconfigure()
  std::vector<CommPtr> accelerators_;      // in the order of their making, the same on all ranks
  std::map<std::pair<at::DeviceIndex, int>, CommPtr> pairs_;  // by device and peer
  std::atomic<bool> closed_{false};
  std::atomic<bool> timing_{false};
  std::mutex batchMutex_;
  ByThread<ToMyself> batches_;  // the batches that threads have open
  mutable std::once_flag recording_;
  mutable std::atomic<bool> recorded_{false};
  std::mutex dumpPipeMutex_;
  std::shared_ptr<DumpPipe> dumpPipe_;
  const bool borrowed_ = false;
  std::atomic<bool> detached_{false};
  std::atomic<uint64_t> splits_{0};
  std::mutex childrenMutex_;
  std::set<std::string> children_;  // names of the groups made of this one
  std::mutex hooksMutex_;
  std::shared_ptr<WorkerStream> completionHooks_;
  // Hooks are shared, since a copy of one, or its end, may need the GIL, for which no thread waits
  // with hooksMutex_ held.
  template <class Hook>
  using Shared = std::shared_ptr<const Hook>;
  Shared<std::function<void(std::shared_ptr<c10d::WorkInfo>)>> onCompletion_;
  bool nanCheck_ = false;
  std::vector<std::pair<std::weak_ptr<Hooks>, Hooks::Id>> nanChecks_;
  std::map<int64_t, Shared<latest::AbortHook>> abortHooks_;
  std::mutex reconfigureMutex_;  // held during a call
  std::set<int64_t> uuids_;      // uuids of all calls
  const std::string handle_ = newHandle(getRank());
  static std::string newHandle(int rank);
  std::map<int64_t, Shared<latest::CompletionHook>> hooksOfCompletion_;
};

}  // namespace torchcomms_pg
