// Tasks for whose results threads wait with a limit.
#pragma once

#include <future>
#include <memory>
#include <type_traits>
#include <utility>

#include "monitor/Monitor.hpp"

namespace torchcomms_pg {

// Calls `body`, which may block for any time, in another thread (Monitor::runDetached). Returns the
// future of its result or its error. What `body` owns lives as long as the future.
template <class Body>
auto apart(Body body) {
  using Task = std::packaged_task<std::invoke_result_t<Body&>()>;
  const auto task = std::make_shared<Task>(std::move(body));
  auto result = task->get_future();
  Monitor::get().runDetached([task] { (*task)(); });
  return result;
}

}  // namespace torchcomms_pg
