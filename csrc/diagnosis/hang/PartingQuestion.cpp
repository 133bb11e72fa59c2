#include "diagnosis/hang/PartingQuestion.hpp"

#include <atomic>
#include <system_error>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/Thread.hpp"

namespace torchcomms_pg {

namespace {

std::atomic<PartingQuestion::Source*>& answers() {
  static std::atomic<PartingQuestion::Source*> set = nullptr;
  return set;
}

}  // namespace

struct PartingQuestion::State {
  Mutex mutex;
  std::optional<std::string> answer GUARDED_BY(mutex);

  void give(std::string text) {
    LockGuard lock(mutex);
    answer = std::move(text);
  }
};

void PartingQuestion::setSource(Source set) {
  answers() = set ? &neverDestroyed<Source>(std::move(set)) : nullptr;
}

bool PartingQuestion::known() {
  return answers() != nullptr;
}

PartingQuestion::PartingQuestion(Asked asked) : state_(std::make_shared<State>()) {
  auto unfinished = ExitGuard::begin();
  auto* source = answers().load();
  if (source == nullptr || !unfinished) {
    state_->give("");
    return;
  }
  try {
    startDetached("tcpg_parting", [unfinished, source, state = state_, asked = std::move(asked)] {
      std::string text;
      attempt([&] { text = (*source)(asked); });
      state->give(std::move(text));
    });
  } catch (const std::system_error&) {
    state_->give("");  // no thread can be started
  }
}

std::optional<std::string> PartingQuestion::answer() const {
  LockGuard lock(state_->mutex);
  return state_->answer;
}

}  // namespace torchcomms_pg
