#include "monitor/PythonStackDump.hpp"

#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "base/Leaked.hpp"
#include "base/OutstandingTask.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

constexpr std::chrono::seconds kPatience{1};

PythonStackDump::Source*& source() {
  static PythonStackDump::Source* set = nullptr;
  return set;
}

}  // namespace

struct PythonStackDump::State {
  std::mutex mutex;
  std::optional<Told> told;
};

void PythonStackDump::setSource(Source set) {
  source() = &leaked<Source>(std::move(set));
}

PythonStackDump::PythonStackDump(std::shared_ptr<const void> stack)
    : state_(std::make_shared<State>()), until_(std::chrono::steady_clock::now() + kPatience) {
  if (source() == nullptr) {
    state_->told.emplace();
    return;
  }
  auto unfinished = OutstandingTask::begin();
  if (!unfinished) {
    state_->told = Told{"Python ends", ""};
    return;
  }
  try {
    startDetached("tcpg_python", [unfinished, state = state_, stack = std::move(stack)]() mutable {
      auto told = source()->ask(stack);
      stack.reset();
      std::lock_guard lock(state->mutex);
      state->told = std::move(told);
    });
  } catch (const std::system_error&) {
    const auto seen = source()->askWithoutGil();
    state_->told = Told{
        "no thread can be started to ask Python" + (seen.empty() ? "" : "; its stacks:\n" + seen),
        ""};
  }
}

bool PythonStackDump::answered() const {
  std::lock_guard lock(state_->mutex);
  return state_->told.has_value();
}

bool PythonStackDump::ready() const {
  return answered() || std::chrono::steady_clock::now() >= until_;
}

PythonStackDump::Told PythonStackDump::tell() const {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->told) {
      return *state_->told;
    }
  }
  const auto seen = source()->askWithoutGil();
  return {
      "a thread holds the GIL and does not give it back, most likely in native code" +
          (seen.empty() ? "" : "; Python's stacks:\n" + seen),
      ""};
}

}  // namespace torchcomms_pg
