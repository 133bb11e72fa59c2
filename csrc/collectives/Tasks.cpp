#include "collectives/Tasks.hpp"

#include <utility>

#include "operation/Types.hpp"

namespace torchcomms_pg {

namespace {

// Tag of messages inside a collective. Users' tags are not negative, so this tag matches none of
// their messages.
constexpr int kExchangeTag = -1;

}  // namespace

Collective moving(
    CollectiveKind kind, const void* input, void* output, int64_t numel, c10::ScalarType dtype,
    int root) {
  const auto wire = wireType(dtype);
  return {
      .kind = kind,
      .input = input,
      .output = output,
      .count = numel * wire.factor,
      .type = wire.type,
      .root = root};
}

void setExchange(
    const Communicator& comm, PreparedOp& call, const std::vector<Part>& sends,
    const std::vector<Part>& receives, c10::ScalarType dtype) {
  const auto wire = wireType(dtype);
  std::vector<Message> messages;
  for (const bool sending : {true, false}) {
    for (const auto& part : sending ? sends : receives) {
      messages.push_back(
          {sending, part.data, part.numel * wire.factor, wire.type, part.peer, kExchangeTag});
    }
  }
  call.task = [&api = comm.api(), messages = std::move(messages)](
                  ncclComm_t handle, cudaStream_t stream) {
    return api.grouped(
        messages, [&](const Message& each) { return api.run(each, handle, stream); });
  };
}

void setGrouped(const Communicator& comm, PreparedOp& call, std::vector<Collective> collectives) {
  call.task = [&api = comm.api(), collectives = std::move(collectives)](
                  ncclComm_t handle, cudaStream_t stream) {
    return api.grouped(
        collectives, [&](const Collective& each) { return api.run(each, handle, stream); });
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
