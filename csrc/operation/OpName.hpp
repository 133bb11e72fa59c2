// Names of operations in hooks, as in the TorchComm API.
#pragma once

#include <cstdint>

namespace torchcomms_pg {

#define TORCHCOMMS_PG_OP_NAMES(X) \
  X(send)                         \
  X(recv)                         \
  X(broadcast)                    \
  X(all_reduce)                   \
  X(reduce)                       \
  X(all_gather)                   \
  X(all_gather_v)                 \
  X(all_gather_single)            \
  X(reduce_scatter)               \
  X(reduce_scatter_v)             \
  X(reduce_scatter_single)        \
  X(all_to_all)                   \
  X(all_to_all_single)            \
  X(all_to_all_v_single)          \
  X(barrier)                      \
  X(scatter)                      \
  X(gather)                       \
  X(gather_single)                \
  X(batch_op_issue)               \
  X(split)                        \
  X(shrink)                       \
  X(new_window)                   \
  X(tensor_register)              \
  X(tensor_deregister)            \
  X(put)                          \
  X(signal)                       \
  X(wait_signal)                  \
  X(finalize)

enum class OpName : uint8_t {
#define TORCHCOMMS_PG_ENUMERATOR(name) name,
  TORCHCOMMS_PG_OP_NAMES(TORCHCOMMS_PG_ENUMERATOR)
#undef TORCHCOMMS_PG_ENUMERATOR
};

inline const char* nameOf(OpName name) {
  switch (name) {
#define TORCHCOMMS_PG_CASE(name) \
  case OpName::name: return #name;
    TORCHCOMMS_PG_OP_NAMES(TORCHCOMMS_PG_CASE)
#undef TORCHCOMMS_PG_CASE
  }
  return "";
}

}  // namespace torchcomms_pg
