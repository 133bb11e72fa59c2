#include "comm/Executor.hpp"

#include "comm/HostExecutor.hpp"
#include "comm/StreamExecutor.hpp"

namespace torchcomms_pg {

std::unique_ptr<Executor> makeExecutor(Communicator& comm, c10::Device device, bool highPriority) {
  if (device.is_cpu()) {
    return std::make_unique<HostExecutor>(comm);
  }
  return std::make_unique<StreamExecutor>(comm, device, highPriority);
}

}  // namespace torchcomms_pg
