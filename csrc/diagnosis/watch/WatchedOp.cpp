#include "diagnosis/watch/WatchedOp.hpp"

#include <pthread.h>

#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "device/AcceleratorDevice.hpp"
#include "diagnosis/watch/WaitedWork.hpp"
#include "diagnosis/watch/WatchedGroup.hpp"
#include "monitor/Monitor.hpp"

namespace torchcomms_pg {

namespace {

// Bounds of the interval at which Python is asked whether a thread is still in its call.
constexpr Milliseconds kSoonest{200};
constexpr Milliseconds kLatest{2000};

// Works of ended operations, which wait to be released.
struct Dropped {
  Mutex mutex;
  std::vector<std::pair<ExitGuard, c10::intrusive_ptr<c10d::Work>>> works GUARDED_BY(mutex);
  bool running GUARDED_BY(mutex) = false;  // a thread is releasing the Works

  void run() {
    for (;;) {
      decltype(works) due;
      LockGuard lock(mutex);
      if (works.empty()) {
        running = false;
        return;
      }
      due.swap(works);  // `due` is freed after the lock is released
    }
  }
};

// Releases a Work in a separate thread, since freeing tensors that Python knows may wait for the
// GIL. Leaks the Work if the interpreter is ending.
void dropDetached(c10::intrusive_ptr<c10d::Work> work) noexcept {
  static PerProcess<Dropped> ofProcess;
  auto unfinished = ExitGuard::begin();
  if (!unfinished) {
    work.release();
    return;
  }
  auto& dropped = ofProcess.get();
  LockGuard lock(dropped.mutex);
  try {
    dropped.works.emplace_back(*unfinished, std::move(work));
    if (!dropped.running) {
      startDetached("tcpg_drop", [&dropped] { dropped.run(); });
      dropped.running = true;
    }
  } catch (const std::exception&) {
    // No thread can be started: the next call releases the Work.
  }
}

}  // namespace

// A question to Python whether the thread is in its call. The thread that asks may wait for the GIL
// without a limit.
struct WatchedOp::Question {
  const Clock::time_point asked = Clock::now();
  std::atomic<bool> answered{false};
  std::atomic<bool> inCall{true};
};

WatchedOp::WatchedOp(
    std::shared_ptr<WatchedGroup> group, Operation op, RecordedOp::Recorders recorders, Stack stack)
    : group_(std::move(group)),
      recording_(std::move(recorders), std::move(stack)),
      op_([&] {
        // A pointer without ownership, since op_ and recording_ are members of one object.
        op.recording = std::shared_ptr<const RecordedOp>(std::shared_ptr<void>(), &recording_);
        return std::move(op);
      }()),
      thread_(static_cast<uint64_t>(pthread_self())),
      nextLook_(op_.issued + kSoonest) {}

WatchedOp::~WatchedOp() {
  if (work_) {
    dropDetached(std::move(work_));
  }
}

void WatchedOp::leave(c10::intrusive_ptr<c10d::Work> work) {
  work_ = std::move(work);
  returned_.store(true, std::memory_order_release);
}

GroupActivity::Waiter WatchedOp::waiter() const {
  return returned() && work_ ? WaitedWork::waiterFor(work_.get()) : GroupActivity::Waiter{};
}

c10::intrusive_ptr<c10::ivalue::Future> WatchedOp::futureOf(c10d::Work& work) {
  static thread_local const std::type_info* latest = nullptr;
  static thread_local bool silent = false;
  const auto& type = typeid(work);
  if (latest != &type) {
    latest = &type;
    // True for c10d's PyWorkHolder and PythonCallbackWork, which call functions of the program.
    silent = std::string_view(type.name()).find("Py") != std::string_view::npos;
  }
  if (silent) {
    return nullptr;
  }
  try {
    return work.getFuture();
  } catch (const std::exception&) {
    silent = true;
    return nullptr;
  }
}

void WatchedOp::leaveInStream(c10::Device device) {
  behind_.emplace(device.type());
  behind_->record(currentStream(device));
  returned_.store(true, std::memory_order_release);
}

std::optional<bool> WatchedOp::inCall(Clock::time_point now) {
  if (returned()) {
    return true;  // the call has returned normally
  }
  if (!question_) {
    auto* const source = StackSource::get();
    auto unfinished = ExitGuard::begin();
    if (source == nullptr || !unfinished) {
      return true;
    }
    question_ = std::make_shared<Question>();
    Monitor::get().runDetached([unfinished = std::move(unfinished), question = question_, source,
                                thread = thread_, stack = stack()] {
      question->inCall = source->stands(thread, stack);
      question->answered = true;
    });
  }
  if (!question_->answered && now - question_->asked < kQuestion) {
    return std::nullopt;
  }
  nextLook_ = now + std::clamp<Clock::duration>(now - op_.issued, kSoonest, kLatest);
  return std::exchange(question_, nullptr)->inCall || returned();
}

std::optional<WatchedOp::End> WatchedOp::ask() const noexcept {
  if (!returned() || (!work_ && !behind_)) {
    return std::nullopt;
  }
  try {
    if (behind_ && behind_->query()) {
      return End{true};
    }
    if (work_ && work_->isCompleted()) {
      const bool failed = work_->exception() != nullptr;
      return End{!failed, failed};
    }
  } catch (const std::exception&) {
    return End{};
  }
  // On the CPU some Works end only in wait(). If this object alone holds the Work, no thread will
  // wait for it.
  if (work_ && !group_->queues() && work_.use_count() == 1) {
    return End{true};
  }
  return group_->closed() ? std::optional(End{}) : std::nullopt;
}

}  // namespace torchcomms_pg
