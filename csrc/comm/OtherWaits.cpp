#include "comm/OtherWaits.hpp"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/PerProcess.hpp"
#include "comm/ProcessActivity.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg::other_waits {

namespace {

// Limit of the questions to the other ranks.
constexpr Milliseconds kAsking{1000};

class Entry final : public Monitor::Watched, public std::enable_shared_from_this<Entry> {
 public:
  explicit Entry(OtherWait given) : wait(std::move(given)) {}

  const OtherWait wait;
  const Clock::time_point since = Clock::now();

  Milliseconds age() const {
    return std::chrono::duration_cast<Milliseconds>(Clock::now() - since);
  }

  void check(Clock::time_point now) noexcept override {
    if (told_ || now - since < wait.verdictAfter) {
      return;
    }
    try {
      if (auto unfinished = ExitGuard::begin()) {
        Monitor::get().runDetached(
            [unfinished = std::move(unfinished), self = shared_from_this()] { self->tell(); });
      }
      told_ = true;
    } catch (const std::exception&) {
      // No thread can be started; the next round tries again.
    }
  }
  void abortInFlight(const char*) noexcept override {}
  std::string failureMessage() const override { return ""; }

  // Prints that the wait has ended, if its verdict was printed.
  void end() {
    std::lock_guard lock(mutex_);
    ended_ = true;
    if (printed_) {
      printLine(
          "torchcomms_pg: the verdict on " + wait.text + " is over: it has ended, " +
          inSeconds(age()) + " after its begin");
    }
  }

 private:
  void tell() {
    std::string text;
    try {
      text = explain(wait.text, kAsking);
    } catch (const std::exception&) {
      return;  // the status's folder cannot be read
    }
    std::lock_guard lock(mutex_);
    if (!ended_ && !text.empty()) {
      printLine("torchcomms_pg: verdict: " + text);
      printed_ = true;
    }
  }

  bool told_ = false;  // of the monitor's thread
  std::mutex mutex_;
  bool ended_ = false;
  bool printed_ = false;
};

struct Entries {
  std::mutex mutex;
  uint64_t last = 0;
  std::map<uint64_t, std::shared_ptr<Entry>> all;
};
Entries& entries() {
  static PerProcess<Entries> ofProcess;
  return ofProcess.get();
}

std::vector<std::shared_ptr<Entry>> current() {
  std::vector<std::shared_ptr<Entry>> all;
  auto& known = entries();
  std::lock_guard lock(known.mutex);
  for (const auto& [number, entry] : known.all) {
    all.push_back(entry);
  }
  return all;
}

}  // namespace

uint64_t begin(OtherWait wait) {
  auto entry = wait.verdictAfter.count() > 0 ? Monitor::watch<Entry>(std::move(wait))
                                             : std::make_shared<Entry>(std::move(wait));
  auto& known = entries();
  std::lock_guard lock(known.mutex);
  known.all.emplace(++known.last, std::move(entry));
  return known.last;
}

void end(uint64_t number) {
  std::shared_ptr<Entry> entry;
  {
    auto& known = entries();
    std::lock_guard lock(known.mutex);
    if (auto found = known.all.extract(number)) {
      entry = std::move(found.mapped());
    }
  }
  if (entry) {  // a forked child has none of its parent's waits
    entry->end();
  }
}

std::vector<Wait> ofDiagnosis() {
  std::vector<Wait> waits;
  for (const auto& entry : current()) {
    Wait wait;
    wait.text = entry->wait.text + ", called at " + entry->wait.calledAt;
    wait.members = runsOf(entry->wait.ranks);
    waits.push_back(std::move(wait));
  }
  return waits;
}

std::vector<status::OtherWait> ofStatus() {
  std::vector<status::OtherWait> waits;
  for (const auto& entry : current()) {
    waits.push_back(
        {entry->wait.text,
         entry->wait.ranks,
         entry->wait.meets,
         entry->age().count(),
         entry->wait.calledAt});
  }
  return waits;
}

}  // namespace torchcomms_pg::other_waits
