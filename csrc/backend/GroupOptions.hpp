// Options that a user may set for a group: `pg_options` of init_process_group.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "base/TorchCompat.hpp"
#include "connect/Connect.hpp"
#include "operation/Group.hpp"

namespace torchcomms_pg {

inline constexpr const char* kBackendName = "torchcomms";

struct GroupOptions : latest::Backend::Options {
  // Makes the default options. `name` is "gloo" if the group replaces a group of Gloo; programs
  // then see that name.
  explicit GroupOptions(
      std::chrono::milliseconds timeout = kBackendDefaultTimeout, std::string name = kBackendName)
      : latest::Backend::Options(std::move(name), timeout) {}
  GroupOptions(const GroupOptions&) = default;

  AcceleratorOptions accelerator;
  ConnectGloo connectGloo;    // connects hosts, for CPU tensors; if null, several hosts raise
  bool blockingWait = false;  // on an accelerator, see Executor::setBlockingWait
  bool nanCheck = false;      // see Backend::enableNanCheck
  // Sets whether a failure ends the process, see FailureState::setEndsProcess. By default (nullopt)
  // a failure on CPU tensors does not end it, since callers wait in the call and get an exception;
  // on an accelerator `acceleratorEnds` decides.
  std::optional<bool> endsProcess;
  bool acceleratorEnds = true;
  bool ends(const at::Device& device) const {
    return endsProcess.value_or(!device.is_cpu() && acceleratorEnds);
  }

  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<GroupOptions>(*this);
  }
};

// Describes the group that has these options.
Group describeGroup(const GroupOptions& options);

}  // namespace torchcomms_pg
