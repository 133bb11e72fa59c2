// A library with NCCL's API.
#pragma once

#include <type_traits>

#include "nccl/Library.hpp"
#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Calls the functions of a table. In place of ncclAlltoAll, ncclGather or ncclScatter, if the table
// lacks them, sends and receives messages in one group, as NCCL's documentation shows. run()
// returns ncclInvalidUsage for a barrier, which NCCL lacks: callers reduce one element instead.
class NcclLibrary : public Library {
 public:
  explicit NcclLibrary(const NcclApi& table) : table_(table) {}

  bool has(Feature feature) const override;
  int version() const override;
  const char* getErrorString(ncclResult_t result) const override {
    return table_.getErrorString(result);
  }
  const char* getLastError(ncclComm_t comm) const override { return table_.getLastError(comm); }

  ncclResult_t getUniqueId(ncclUniqueId* id) const override { return table_.getUniqueId(id); }
  ncclResult_t init(
      ncclComm_t* made, std::span<ncclUniqueId> ids, int ranks, int rank,
      ncclConfig_t* config) const override;
  ncclResult_t commFinalize(ncclComm_t comm) const override { return table_.commFinalize(comm); }
  ncclResult_t commDestroy(ncclComm_t comm) const override { return table_.commDestroy(comm); }
  ncclResult_t commAbort(ncclComm_t comm) const override { return table_.commAbort(comm); }
  ncclResult_t commSplit(
      ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) const override {
    return table_.commSplit(comm, color, key, made, config);
  }
  ncclResult_t shrink(
      ncclComm_t comm, std::span<int> excluded, ncclComm_t* made, ncclConfig_t* config, int flags,
      std::chrono::steady_clock::time_point deadline) const override;
  ncclResult_t commRevoke(ncclComm_t comm, int flags) const override {
    return call(table_.commRevoke, comm, flags);
  }
  ncclResult_t commCount(ncclComm_t comm, int* count) const override {
    return table_.commCount(comm, count);
  }
  ncclResult_t commUserRank(ncclComm_t comm, int* rank) const override {
    return table_.commUserRank(comm, rank);
  }
  ncclResult_t commGetAsyncError(ncclComm_t comm, ncclResult_t* error) const override {
    return table_.commGetAsyncError(comm, error);
  }

  ncclResult_t run(
      const Collective& collective, ncclComm_t comm, cudaStream_t stream) const override;
  ncclResult_t run(const Message& message, ncclComm_t comm, cudaStream_t stream) const override;
  ncclResult_t runGrouped(
      std::span<const Collective> collectives, ncclComm_t comm, cudaStream_t stream) const override;
  ncclResult_t groupStart() const override { return table_.groupStart(); }
  ncclResult_t groupEnd() const override { return table_.groupEnd(); }

  ncclResult_t memAlloc(void** pointer, size_t size) const override {
    return call(table_.memAlloc, pointer, size);
  }
  ncclResult_t memFree(void* pointer) const override { return call(table_.memFree, pointer); }
  ncclResult_t commRegister(
      ncclComm_t comm, void* buffer, size_t size, void** handle) const override {
    return call(table_.commRegister, comm, buffer, size, handle);
  }
  ncclResult_t commDeregister(ncclComm_t comm, void* handle) const override {
    return call(table_.commDeregister, comm, handle);
  }
  ncclResult_t commSuspend(ncclComm_t comm, int flags) const override {
    return call(table_.commSuspend, comm, flags);
  }
  ncclResult_t commResume(ncclComm_t comm) const override { return call(table_.commResume, comm); }
  ncclResult_t commMemStats(
      ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) const override {
    return call(table_.commMemStats, comm, stat, value);
  }

  ncclResult_t commWindowRegister(
      ncclComm_t comm, void* buffer, size_t size, ncclWindow_t* window, int flags) const override {
    return call(table_.commWindowRegister, comm, buffer, size, window, flags);
  }
  ncclResult_t commWindowDeregister(ncclComm_t comm, ncclWindow_t window) const override {
    return call(table_.commWindowDeregister, comm, window);
  }
  ncclResult_t signal(
      int peer, int index, int context, unsigned int flags, ncclComm_t comm,
      cudaStream_t stream) const override {
    return call(table_.signal, peer, index, context, flags, comm, stream);
  }
  ncclResult_t waitSignal(
      int count, ncclWaitSignalDesc_t* all, ncclComm_t comm, cudaStream_t stream) const override {
    return call(table_.waitSignal, count, all, comm, stream);
  }
  ncclResult_t getPeerDevicePointer(
      ncclWindow_t window, size_t offset, int peer, void** pointer) const override {
    return call(table_.getPeerDevicePointer, window, offset, peer, pointer);
  }

 protected:
  NcclLibrary() = default;  // for a subclass that fills the table

  NcclApi table_;

 private:
  template <class... Arguments>
  static ncclResult_t call(
      ncclResult_t (*function)(Arguments...), std::type_identity_t<Arguments>... arguments) {
    return function == nullptr ? ncclInvalidUsage : function(arguments...);
  }
};

}  // namespace torchcomms_pg
