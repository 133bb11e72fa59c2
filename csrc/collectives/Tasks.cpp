#include "collectives/Tasks.hpp"

#include <utility>

namespace torchcomms_pg {

namespace {

// Tag of messages inside a collective. Users' tags are not negative, so this tag matches none of
// their messages.
constexpr int kExchangeTag = -1;

}  // namespace

void setExchange(
    const Communicator& comm, PreparedOp& call, std::vector<Part> sends, std::vector<Part> receives,
    ncclDataType_t type) {
  call.task = [&api = comm.api(), sends = std::move(sends), receives = std::move(receives), type](
                  ncclComm_t handle, cudaStream_t stream) {
    return api.grouped([&] {
      for (const bool sending : {true, false}) {
        for (const auto& part : sending ? sends : receives) {
          const auto result = api.run(
              {sending, part.data, part.count, type, part.peer, kExchangeTag}, handle, stream);
          if (result != ncclSuccess) {
            return result;
          }
        }
      }
      return ncclSuccess;
    });
  };
}

void setGrouped(const Communicator& comm, PreparedOp& call, std::vector<Collective> collectives) {
  call.task = [&api = comm.api(), collectives = std::move(collectives)](
                  ncclComm_t handle, cudaStream_t stream) {
    return api.grouped([&] {
      for (const auto& collective : collectives) {
        const auto result = api.run(collective, handle, stream);
        if (result != ncclSuccess) {
          return result;
        }
      }
      return ncclSuccess;
    });
  };
}

void setCopyBack(PreparedOp& call, const std::vector<OutputBuffer>& targets) {
  call.epilogue = [targets] {
    for (const auto& target : targets) {
      target.copyBack();
    }
  };
}

}  // namespace torchcomms_pg
