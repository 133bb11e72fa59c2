// Hooks on the operations of a c10d group, among them the check for NaN.
#include <chrono>
#include <memory>
#include <utility>

#include "backend/Backend.hpp"
#include "base/Mutex.hpp"
#include "hooks/HookCall.hpp"
#include "hooks/NanCheck.hpp"

namespace torchcomms_pg {

void Backend::enableNanCheck(bool enable) {
  LockGuard lock(hooksMutex_);
  nanCheck_ = enable;
  if (enable) {
    for (const auto& comm : communicators()) {
      installNanCheck(*comm);
    }
    return;
  }
  for (const auto& [hooks, id] : std::exchange(nanChecks_, {})) {
    if (const auto there = hooks.lock()) {
      there->remove(id);
    }
  }
}

void Backend::installNanCheck(Communicator& comm) {
  const auto& hooks = comm.hooks();
  std::erase_if(nanChecks_, [&](const auto& known) {
    if (known.first.lock() != hooks) {
      return false;
    }
    hooks->remove(known.second);  // the former communicator may have had another rank
    return true;
  });
  const auto id =
      hooks->add(Hooks::Pre([rank = comm.rank()](const auto& args) { refuseNan(*args, rank); }));
  nanChecks_.emplace_back(hooks, id);
}

void Backend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  auto shared = std::make_shared<const std::function<void(std::shared_ptr<c10d::WorkInfo>)>>(hook);
  LockGuard lock(hooksMutex_);
  TORCH_CHECK_WITH(
      DistBackendError, completionHooks_ == nullptr,
      "register_on_completion_hook: OnCompletion hook already registered with group '",
      options_->group_name, "', which takes one");
  auto thread = std::make_shared<WorkerStream>("tcpg_hooks");
  thread->start();
  onCompletionHook_ = std::move(hook);  // hasHooks() reads it
  onCompletion_ = std::move(shared);
  completionHooks_ = std::move(thread);
  for (const auto& comm : communicators()) {
    installGroupHooks(*comm);
  }
  enableCollectivesTiming();
}

void Backend::installHooks(Communicator& comm) {
  LockGuard lock(hooksMutex_);
  installGroupHooks(comm);
  if (nanCheck_) {
    installNanCheck(comm);
  }
}

void Backend::installGroupHooks(Communicator& comm) const {
  GroupHooks::Failed failed;
  if (!abortHooks_.empty()) {
    failed = [hooks = abortHooks_] {
      for (const auto& [id, hook] : hooks) {
        callHook("an abort hook", *hook);
      }
    };
  }
  GroupHooks::End end;
  if (onCompletion_ || !hooksOfCompletion_.empty()) {
    end = [thread = completionHooks_, onCompletion = onCompletion_, hooks = hooksOfCompletion_](
              const Operation& op, Work* work, Clock::time_point started,
              Clock::time_point finished) {
      if (onCompletion) {
        auto info = std::make_shared<c10d::WorkInfo>(
            traits(op.kind).type, op.seq, started, finished, finished - started);
        thread->enqueue([onCompletion, info = std::move(info)] {
          callHook("a completion hook", [&] { (*onCompletion)(info); });
        });
      }
      if (work == nullptr || !work->isSuccess()) {
        return;  // these hooks are for works that have succeeded
      }
      latest::CompletionHookArgs args;
      args.completionKey = work->getCompletionKey();
      if (started != Clock::time_point{}) {
        args.duration_ms = std::chrono::duration<float, std::milli>(finished - started).count();
      }
      for (const auto& [id, hook] : hooks) {
        callHook("a completion hook", [&, &hook = *hook] { hook(args); });
      }
    };
  }
  comm.groupHooks().set(std::move(end), std::move(failed));
}

template <class Hook>
void Backend::setHook(SharedById<Hook> Backend::* hooks, int64_t id, Shared<Hook> hook) {
  LockGuard lock(hooksMutex_);
  (this->*hooks)[id].swap(hook);  // a former hook is destroyed after the lock is released
  std::erase_if(this->*hooks, [](const auto& known) { return known.second == nullptr; });
  for (const auto& comm : communicators()) {
    installGroupHooks(*comm);
  }
}

void Backend::registerCompletionHook(int64_t id, latest::CompletionHook hook) {
  setHook(
      &Backend::hooksOfCompletion_, id,
      std::make_shared<const latest::CompletionHook>(std::move(hook)));
}

void Backend::unregisterCompletionHook(int64_t id) {
  setHook(&Backend::hooksOfCompletion_, id, Shared<latest::CompletionHook>());
}

void Backend::registerAbortHook(int64_t id, latest::AbortHook hook) {
  setHook(&Backend::abortHooks_, id, std::make_shared<const latest::AbortHook>(std::move(hook)));
}

void Backend::unregisterAbortHook(int64_t id) {
  setHook(&Backend::abortHooks_, id, Shared<latest::AbortHook>());
}

}  // namespace torchcomms_pg
