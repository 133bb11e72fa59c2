// The c10d backend "torchcomms": translates c10d's calls into those of a
// Communicator.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "backend/GroupOptions.hpp"
#include "base/TorchCompat.hpp"
#include "comm/CallbackThread.hpp"
#include "comm/Communicator.hpp"
#include "recorder/DumpPipe.hpp"

namespace torchcomms_pg {

// Thread-safe. CPU tensors go over shared memory, between hosts over Gloo. Tensors of an
// accelerator go over a communicator for their device, which the first of them makes; every rank of
// the group takes part in that. Follows ProcessGroupNCCL where the two can be compared; a call with
// asyncOp false returns a null Work when the operation has finished.
class Backend final : public latest::Backend {
 public:
  using TensorList = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using CommPtr = std::shared_ptr<Communicator>;

  // Collective over the ranks of the group. Raises CommError when not all of
  // them come within the timeout of `options`. With `options->enable_reconfigure`
  // nobody meets before reconfigure().
  Backend(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<GroupOptions> options);
  // Of a communicator that belongs to somebody else, who ends it. Shutting the group down leaves it
  // as it is. A communicator has one such group at a time.
  Backend(CommPtr comm, c10::intrusive_ptr<GroupOptions> options);
  ~Backend() override;

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }

  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
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

  void setSequenceNumberForGroup() override {}  // they start at 0 everywhere
  uint64_t getSequenceNumberForGroup() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  bool isInitialized() override;
  void eagerConnectSingleDevice(at::Device device) override;
  void enableCollectivesTiming() override;
  // Whether operations that would send NaN are refused.
  void enableNanCheck(bool enable);
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Memory of accelerators (Memory.cpp): see Communicator. With several devices of one rank
  // the statistics are sums.
  void registerPool(
      Registrations::Pool pool,
      const std::map<int, std::vector<Segment>>& segments,  // by index of the device
      bool symmetric);
  void deregisterPool(Registrations::Pool pool);
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;

  // Another communicator in place of this group's, of the members that the call names, which may
  // be more or fewer (Reconfigure.cpp). Collective over them; returns when all have come, with a
  // finished Work. What is in flight on the old communicator fails. After an error the group is as
  // it was. No groups are made of this one meanwhile.
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

  // The communicator for CPU tensors; raises where there is none.
  CommPtr cpuCommunicator(const char* what) const;

  // NCCL's communicator of the group's accelerator, for code that calls NCCL itself; where there
  // are several devices, of the current one. Raises where there is none.
  int64_t commPtr();

  // Counts the groups of this process.
  uint64_t uid() const { return uid_; }

  // The communicator for tensors of the device; makes it where it is an
  // accelerator's and there is none yet.
  CommPtr communicator(const char* what, at::Device device);

 private:
  // Of a shrunk group, whose communicators are there already.
  Backend(
      c10::intrusive_ptr<c10d::Store> store,
      const std::vector<CommPtr>& comms,
      int rank,
      int size,
      c10::intrusive_ptr<GroupOptions> options);

  void start();
  std::vector<Peer> peersOfOtherGroups() const;
  void forgetPeers();
  // Null before the first reconfigure(), and in a group that was made of an accelerator's.
  CommPtr cpu() const { return cpu_.load(std::memory_order_acquire); }
  // Before each use. Recording starts with the first: torch describes a group after it has made it.
  void prepare(const char* what) const;
  void record(Communicator& comm) const;
  // Has the communicator call nothing of this group any more.
  void detach();
  void installAbortHooks(Communicator& comm) const;
  void installEndHook(Communicator& comm) const;
  void installNanCheck(Communicator& comm);
  // Chooses the communicator by the tensor's device.
  CommPtr route(const char* what, const at::Tensor& tensor);
  // Enters a communicator where those for its device are looked for.
  void keep(CommPtr comm);
  // Those that there are.
  std::vector<CommPtr> communicators() const;
  // The only one of an accelerator, or that of the current one; null: neither is there.
  CommPtr accelerator() const;
  CommPtr barrierCommunicator(const c10d::BarrierOptions& opts);
  // Of accelerators; raises where there are none.
  std::vector<CommPtr> accelerators(const char* what) const;
  CommPtr newCommunicator(at::Device device);
  void installHooks(Communicator& comm);
  // Gives a new communicator what the group has been asked for. Call it when communicators()
  // has the new one, so that what is asked for meanwhile is not missed.
  void adopt(Communicator& comm);
  // Calls `body`; an operation that throws leaves no batch open.
  template <class Body>
  WorkPtr issue(const CommPtr& comm, bool async, Body&& body);
  // Launches all that `body` issues together: operations of the kind `parts`, of `inputs`.
  template <class Body>
  WorkPtr together(
      const CommPtr& comm, bool async, OpKind parts, const TensorList& inputs, Body&& body);
  // A copy of `opts`, or where there are none, of this group's.
  c10::intrusive_ptr<GroupOptions> childOptions(
      const c10::intrusive_ptr<c10d::Backend::Options>& opts, const char* what) const;
  // Whether the message of a batch is one to this rank itself on a device without a communicator,
  // whose making would take all ranks: then it is kept, and copied when the batch ends.
  bool keptForMyself(const at::Tensor& tensor, int peer, bool sends);
  WorkPtr copyToMyself();
  // Forgets what the calling thread has collected.
  void dropBatches();
  std::vector<int64_t> globalRanks() const;
  std::string members() const;  // the global ranks, as a key

  static uint64_t nextUid();

  const uint64_t uid_ = nextUid();
  const c10::intrusive_ptr<GroupOptions> options_;
  // Null: the communicators are those of a TorchComm, or shrunk of one, and no more are made.
  const c10::intrusive_ptr<c10d::Store> store_;
  std::string members_;       // how they find each other in the store; by reconfigure()
  std::atomic<CommPtr> cpu_;  // replaced by reconfigure()
  std::vector<Peer> peers_;   // of the ranks it was made of; not where others made it
  std::mutex creationMutex_;  // held while the ranks meet for a device
  mutable std::mutex acceleratorsMutex_;
  std::map<at::DeviceIndex, CommPtr> accelerators_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> timing_{false};
  std::mutex batchMutex_;
  std::set<std::thread::id> batches_;  // the threads that have one open
  struct ToMyself {
    std::vector<at::Tensor> sent;
    std::vector<at::Tensor> received;
  };
  std::map<std::thread::id, ToMyself> toMyself_;  // what their batches have kept
  mutable std::once_flag recording_;
  mutable std::atomic<bool> recorded_{false};
  std::atomic<std::shared_ptr<DumpPipe>> dumpPipe_;
  const bool borrowed_ = false;
  std::atomic<bool> detached_{false};
  std::atomic<uint64_t> splits_{0};
  std::mutex hooksMutex_;
  std::shared_ptr<CallbackThread> completionHooks_;
  bool nanCheck_ = false;
  std::vector<std::pair<std::weak_ptr<Hooks>, Hooks::Id>> nanChecks_;
  std::map<int64_t, latest::AbortHook> abortHooks_;
  std::mutex reconfigureMutex_;  // held during a call
  std::set<int64_t> uuids_;      // of all calls
  const std::string handle_ = newHandle(getRank());
  static std::string newHandle(int rank);
  std::map<int64_t, latest::CompletionHook> hooksOfCompletion_;
};

}  // namespace torchcomms_pg
