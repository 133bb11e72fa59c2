// What a user may set for a group: `pg_options` of init_process_group.
#pragma once

#include "comm/Connect.hpp"
#include "comm/TorchCompat.hpp"

namespace torchcomms_pg {

inline constexpr const char* kBackendName = "torchcomms";

struct GroupOptions : c10d::Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, timeout) {}
  GroupOptions(const GroupOptions&) = default;

  AcceleratorOptions accelerator;
  gloo::Connect connectGloo;  // for CPU tensors of ranks on several hosts; null: an error
  bool endsProcess = false;   // upon a failure, see Communicator::setEndsProcess
  bool blockingWait = false;  // on an accelerator, see Communicator::setBlockingWait
  bool nanCheck = false;      // as enableNanCheck() sets it

  c10::intrusive_ptr<c10d::Backend::Options> clone() const TORCHCOMMS_PG_OVERRIDE_FROM_14 {
    return c10::make_intrusive<GroupOptions>(*this);
  }
};

}  // namespace torchcomms_pg
