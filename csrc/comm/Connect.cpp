#include "comm/Connect.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "comm/Bootstrap.hpp"
#include "device/AcceleratorDevice.hpp"
#include "shm/Api.hpp"

namespace torchcomms_pg {

namespace {

std::array<std::atomic<bool>, static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)>
    hostStreams{};

// What libnccl can do, and no more, over shared memory. So a simulated
// accelerator takes the path of a GPU, with the fallbacks of an old NCCL.
const NcclApi& plainApi() {
  static const NcclApi table = [] {
    NcclApi plain = shm::api();
    plain.sendTagged = nullptr;
    plain.recvTagged = nullptr;
    plain.absentRanks = nullptr;
    plain.fail = nullptr;
    plain.allToAll = nullptr;
    plain.gather = nullptr;
    plain.scatter = nullptr;
    return plain;
  }();
  return table;
}

void checkDevice(const std::string& group, c10::Device device) {
  const bool known = c10::impl::hasDeviceGuardImpl(device.type());
  const int count = known ? c10::impl::VirtualGuardImpl(device.type()).deviceCount() : 0;
  TORCH_CHECK_VALUE(
      device.index() < count,
      "group '",
      group,
      "' cannot communicate tensors on ",
      device,
      ": torch sees ",
      count,
      " such devices here. It takes a GPU, its driver, and a torch that is built for it");
}

void logOnce(const Library& library) {
  static std::once_flag once;
  std::call_once(once, [&] {
    LOG(INFO) << "torchcomms_pg: NCCL " << versionText(library.version()) << " at "
              << library.path() << " (" << library.origin() << ")";
  });
}

}  // namespace

void useHostStreams(c10::DeviceType type) {
  hostStreams[static_cast<size_t>(type)] = true;
}

std::shared_ptr<Communicator> connect(
    const Meeting& meeting, c10::Device device, const AcceleratorOptions& options) {
  const auto make = [&](const NcclApi& api, ncclComm_t comm) {
    return std::make_shared<Communicator>(
        api,
        comm,
        meeting.rank,
        meeting.size,
        meeting.group,
        meeting.timeout,
        std::make_unique<AcceleratorDevice>(device, options.highPriority));
  };
  const auto& name = meeting.group.name;
  if (hostStreams[static_cast<size_t>(device.type())]) {
    const auto joined = joinOnHost(
        plainApi(),
        meeting.store,
        meeting.rank,
        meeting.size,
        name,
        meeting.members,
        meeting.timeout);
    TORCH_CHECK(
        joined.comm != nullptr,
        "group '",
        name,
        "': tensors on ",
        device,
        " go through shared memory, and its ranks are on different hosts: ",
        joined.unavailable);
    return make(plainApi(), joined.comm);
  }
  TORCH_CHECK_VALUE(
      device.is_cuda(),
      "group '",
      name,
      "' cannot communicate tensors on ",
      device,
      ": torchcomms_pg carries CPU and CUDA tensors; move it with tensor.to('cpu')");
  checkDevice(name, device);
  const auto& library = Library::load(options.library);
  logOnce(library);
  const auto id = meetOverNccl(
      library, meeting.store, meeting.rank, meeting.size, name, meeting.members, meeting.timeout);
  const c10::DeviceGuard onDevice(device);
  return make(library.api(), initComm(library.api(), id, meeting.rank, meeting.size, name));
}

}  // namespace torchcomms_pg
