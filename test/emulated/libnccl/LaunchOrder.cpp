#include "libnccl/LaunchOrder.hpp"

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "libnccl/Version.hpp"

namespace emulated {

namespace {

using Ended = std::atomic<int>;  // streams whose kernels have not ended

std::mutex mutex;
std::map<int, std::shared_ptr<Ended>> latest;  // by device

bool isImplicit() {
  const char* const text = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  return text != nullptr && std::string_view(text) == "1" &&
         ncclVersion() >= NCCL_VERSION(2, 26, 2);
}

}  // namespace

void inLaunchOrder(
    int device, const std::vector<torchcomms_pg::host::HostStream*>& streams,
    const std::function<void()>& launch) {
  if (!isImplicit() || streams.empty()) {
    launch();
    return;
  }
  const std::lock_guard lock(mutex);
  const auto mine = std::make_shared<Ended>(static_cast<int>(streams.size()));
  const auto before = std::exchange(latest[device], mine);
  for (auto* const stream : streams) {
    stream->enqueue([before] {
      for (int left = before == nullptr ? 0 : before->load(); left > 0; left = before->load()) {
        before->wait(left);
      }
    });
  }
  launch();
  for (auto* const stream : streams) {
    stream->enqueue([mine] {
      --*mine;
      mine->notify_all();
    });
  }
}

}  // namespace emulated
