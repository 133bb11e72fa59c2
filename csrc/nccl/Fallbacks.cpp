#include "nccl/Fallbacks.hpp"

#include "nccl/ElementSize.hpp"

namespace torchcomms_pg {

namespace {

// The messages of one direction: one for each rank from `first` to before `last`, `step` bytes
// apart in memory.
struct Side {
  const void* data;
  size_t step;
  int first;
  int last;
};

ncclResult_t exchange(
    const NcclApi& api,
    const Side& in,
    const Side& out,
    size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream) {
  return grouped(api, [&] {
    const auto* from = static_cast<const char*>(in.data);
    for (int peer = in.first; peer < in.last; ++peer, from += in.step) {
      const auto result = api.send(from, count, type, peer, comm, stream);
      if (result != ncclSuccess) {
        return result;
      }
    }
    auto* to = static_cast<char*>(const_cast<void*>(out.data));
    for (int peer = out.first; peer < out.last; ++peer, to += out.step) {
      const auto result = api.recv(to, count, type, peer, comm, stream);
      if (result != ncclSuccess) {
        return result;
      }
    }
    return ncclSuccess;
  });
}

struct Place {
  int rank = 0;
  int size = 0;
};

ncclResult_t find(const NcclApi& api, ncclComm_t comm, Place& place) {
  const auto result = api.commUserRank(comm, &place.rank);
  return result != ncclSuccess ? result : api.commCount(comm, &place.size);
}

}  // namespace

ncclResult_t allToAll(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    ncclComm_t comm,
    cudaStream_t stream) {
  if (api.allToAll != nullptr) {
    return api.allToAll(in, out, count, type, comm, stream);
  }
  Place place;
  if (const auto result = find(api, comm, place); result != ncclSuccess) {
    return result;
  }
  const size_t step = count * elementSize(type);
  return exchange(
      api, {in, step, 0, place.size}, {out, step, 0, place.size}, count, type, comm, stream);
}

ncclResult_t gather(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream) {
  if (api.gather != nullptr) {
    return api.gather(in, out, count, type, root, comm, stream);
  }
  Place place;
  if (const auto result = find(api, comm, place); result != ncclSuccess) {
    return result;
  }
  const int last = place.rank == root ? place.size : 0;
  const size_t step = count * elementSize(type);
  return exchange(api, {in, 0, root, root + 1}, {out, step, 0, last}, count, type, comm, stream);
}

ncclResult_t scatter(
    const NcclApi& api,
    const void* in,
    void* out,
    size_t count,
    ncclDataType_t type,
    int root,
    ncclComm_t comm,
    cudaStream_t stream) {
  if (api.scatter != nullptr) {
    return api.scatter(in, out, count, type, root, comm, stream);
  }
  Place place;
  if (const auto result = find(api, comm, place); result != ncclSuccess) {
    return result;
  }
  const int last = place.rank == root ? place.size : 0;
  const size_t step = count * elementSize(type);
  return exchange(api, {in, step, 0, last}, {out, 0, root, root + 1}, count, type, comm, stream);
}

}  // namespace torchcomms_pg
