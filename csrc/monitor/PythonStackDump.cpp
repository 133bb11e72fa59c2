#include "monitor/PythonStackDump.hpp"

#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/NeverDestroyed.hpp"
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
  source() = &neverDestroyed<Source>(std::move(set));
}

PythonStackDump::PythonStackDump(Stacks stacks)
    : state_(std::make_shared<State>()), begun_(std::chrono::steady_clock::now()) {
  const auto none = std::vector<std::string>(stacks.size());
  if (source() == nullptr) {
    state_->told = Told{"", none};
    return;
  }
  auto unfinished = ExitGuard::begin();
  if (!unfinished) {
    state_->told = Told{"Python ends", none};
    return;
  }
  try {
    startDetached(
        "tcpg_python", [unfinished, state = state_, stacks = std::move(stacks)]() mutable {
          auto told = source()->ask(stacks);
          stacks.clear();
          std::lock_guard lock(state->mutex);
          state->told = std::move(told);
        });
  } catch (const std::system_error&) {
    const auto seen = seenWithoutGil();
    state_->told = Told{
        "no thread can be started to ask Python" + (seen.empty() ? "" : "; its stacks:\n" + seen),
        none};
  }
}

bool PythonStackDump::answered() const {
  std::lock_guard lock(state_->mutex);
  return state_->told.has_value();
}

bool PythonStackDump::ready() const {
  return answered() || std::chrono::steady_clock::now() - begun_ >= kPatience;
}

PythonStackDump::Told PythonStackDump::tell() const {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->told) {
      return *state_->told;
    }
  }
  const auto seen = seenWithoutGil();
  return {
      "a thread holds the GIL and does not give it back, most likely in native code" +
          (seen.empty() ? "" : "; Python's stacks:\n" + seen),
      {}};
}

std::string PythonStackDump::seenWithoutGil() {
  return source() == nullptr ? "" : source()->askWithoutGil();
}

}  // namespace torchcomms_pg
