// Objects at which the monitor's thread looks for a while. Their destructors wait for that thread,
// so the last reference must not go in it; it goes in a thread of its own.
#pragma once

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "base/Leaked.hpp"
#include "base/OutstandingTask.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg {

template <class T>
class HeldApart {
 public:
  explicit HeldApart(std::vector<std::shared_ptr<T>> all) : all_(std::move(all)) {}
  HeldApart(const HeldApart&) = delete;
  HeldApart& operator=(const HeldApart&) = delete;
  ~HeldApart() {
    if (all_.empty()) {
      return;
    }
    const auto kept = std::make_shared<std::vector<std::shared_ptr<T>>>(std::move(all_));
    try {
      Monitor::get().runApart([unfinished = OutstandingTask(), kept] { kept->clear(); });
    } catch (const std::exception&) {
      // Leaks them: no thread can be had, and this is better than to wait forever.
      leaked<std::shared_ptr<std::vector<std::shared_ptr<T>>>>(kept);
    }
  }

  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

 private:
  std::vector<std::shared_ptr<T>> all_;
};

}  // namespace torchcomms_pg
