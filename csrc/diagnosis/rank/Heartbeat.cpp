#include "diagnosis/rank/Heartbeat.hpp"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Text.hpp"
#include "base/Thread.hpp"
#include "diagnosis/rank/PythonStackDump.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kMaxTick{1000};
// Time in which the process writes why it ends.
constexpr milliseconds kLastWords{1000};

struct WatchState {
  Mutex mutex;
  HeartbeatOptions options GUARDED_BY(mutex);
  bool running GUARDED_BY(mutex) = false;
};
PerProcess<WatchState> watchState;

void print(const std::string& text) {
  printLine("torchcomms_pg: pid " + std::to_string(getpid()) + ": " + text);
}

bool monitorRuns() {
  return Monitor::get().lastRound() != Clock::time_point{};
}

class Watch {
 public:
  void lookAtMonitor(const HeartbeatOptions& options, Clock::time_point now) {
    const auto last = Monitor::get().lastRound();
    if (last == Clock::time_point{} || now - last < options.patience) {
      toldOfMonitor_ = false;
    } else if (!toldOfMonitor_) {
      toldOfMonitor_ = true;
      print(
          "the monitor's thread has not come round for " + inSeconds(options.patience) +
          ": deadlines do not pass. It is stuck in the library of a communicator, or is not given "
          "a core; gdb, or py-spy dump --native, tells where" +
          (options.endsProcess ? ". TORCH_NCCL_ENABLE_MONITORING has this process end" : ""));
      if (options.endsProcess) {
        awaitPrinted(kLastWords);
        _exit(1);
      }
    }
  }

  // Asks for the GIL once per `patience`, unless an earlier question is still open.
  void lookAtGil(const HeartbeatOptions& options, Clock::time_point now) {
    if (!question_) {
      if (now - asked_ >= options.patience) {
        asked_ = now;
        toldOfGil_ = false;
        question_.emplace(PythonStackDump::Stacks{});
      }
    } else if (question_->answered()) {
      question_.reset();
    } else if (
        const bool ready = now - asked_ >= options.patience / 2 && question_->ready();
        !toldOfGil_ && ready && now - asked_ >= options.patience) {
      toldOfGil_ = true;
      print("for " + inSeconds(options.patience) + " " + question_->tell().threads);
    }
  }

 private:
  bool toldOfMonitor_ = false;
  bool toldOfGil_ = false;
  Clock::time_point asked_ = Clock::now();
  std::optional<PythonStackDump> question_;
};

void run() {
  auto& state = watchState.get();
  Watch watch;
  for (;;) {
    HeartbeatOptions options;
    {
      LockGuard lock(state.mutex);
      options = state.options;
      if (options.patience.count() == 0 || !monitorRuns()) {
        state.running = false;
        return;
      }
    }
    attempt([&] {
      watch.lookAtMonitor(options, Clock::now());
      watch.lookAtGil(options, Clock::now());
    });
    std::this_thread::sleep_for(std::clamp(options.patience / 4, milliseconds(10), kMaxTick));
  }
}

}  // namespace

void watchOverMonitor(HeartbeatOptions options) {
  auto& state = watchState.get();
  LockGuard lock(state.mutex);
  state.options = options;
  if (options.patience.count() > 0 && !state.running && monitorRuns()) {
    try {
      startDetached("tcpg_heartbeat", run);
      state.running = true;
    } catch (const std::system_error& error) {
      print(
          std::string("nobody looks after the monitor: no thread can be started: ") + error.what());
    }
  }
}

}  // namespace torchcomms_pg
