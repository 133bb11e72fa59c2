#include "diagnosis/group/OtherWaits.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/ExitGuard.hpp"
#include "base/Mutex.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "diagnosis/group/ErrorFile.hpp"
#include "diagnosis/group/LastWords.hpp"
#include "diagnosis/group/ProcessActivity.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg::other_waits {

namespace {

// Limit of the questions to the other ranks.
constexpr Milliseconds kAskingOthers{1000};
constexpr Milliseconds kLastAsking{450};

// Age from which on a process that SIGTERM ends reports a wait.
constexpr Milliseconds kLeastTold{300};

// kLearning: age from which on other processes can learn of a wait without a group; healthy waits
// mostly end before. A verdict waits for kLearning and kMargin longer, for ranks that have just
// arrived.
constexpr Milliseconds kLearning{1000};
constexpr Milliseconds kMargin{200};
constexpr Milliseconds kBetweenAttempts{1000};

class Entry final : public Monitor::Watched, public std::enable_shared_from_this<Entry> {
 public:
  explicit Entry(OtherWait given) : wait(std::move(given)) {
    if (wait.place) {
      meeting_ = std::make_shared<Meeting>(*wait.place, wait.self);
    }
  }

  const OtherWait wait;
  const Clock::time_point since = Clock::now();

  Milliseconds age() const {
    return std::chrono::duration_cast<Milliseconds>(Clock::now() - since);
  }
  uint64_t meeting() const { return meeting_ ? meeting_->id() : 0; }

  void check(Clock::time_point now) noexcept REQUIRES(monitorThread) override {
    try {
      if (meeting_ && now - since >= learning() && now >= nextTry_ && !listed_) {
        tried_ = true;
        apart([self = shared_from_this()] { self->enlistSelf(); });
        nextTry_ = now + kBetweenAttempts;
      }
      if (wait.verdictAfter.count() > 0 && !told_ && now - since >= wait.verdictAfter) {
        apart([self = shared_from_this()] { self->tell(); });
        told_ = true;
      }
    } catch (const std::exception&) {
      // No thread can be started; the next round tries again.
    }
  }
  void abortInFlight(const char*) noexcept override {}
  std::string failureMessage() const override { return ""; }

  // Prints that the wait has ended, if its verdict was printed.
  void end(bool joined) {
    std::string written;
    {
      LockGuard lock(mutex_);
      ended_ = true;
      server_.reset();
      written = written_;
    }
    if (!written.empty()) {
      printLine(
          "torchcomms_pg: the verdict on " + wait.text + " is over: it has ended, " +
          inSeconds(age()) + " after its begin");
      error_file::withdraw(written);
    }
    if (meeting_ && tried_) {
      try {
        apart([meeting = meeting_, joined] { meeting->leave(joined); });
      } catch (const std::exception&) {
        // No thread can be started: the list keeps this rank.
      }
    }
  }

  // Returns which ranks are missing, as the rest of a line, or "" if that is not known. May raise
  // what status and store raise.
  std::string missing(Milliseconds patience) {
    if (meeting_) {
      return ": " + ofMeeting().text;
    }
    const auto found = explain(wait.text, patience);
    return !found ? "" : wait.meets ? ": " + notCome(found->wait.waitsFor) : "";
  }

 private:
  struct Known {
    std::string text;
    std::vector<int64_t> missing;
  };

  Milliseconds learning() const {
    return wait.verdictAfter.count() > 0 ? std::min(kLearning, wait.verdictAfter / 2) : kLearning;
  }

  static void apart(std::function<void()> body) {
    if (auto unfinished = ExitGuard::begin()) {
      // It raises if no process serves the store, or the status's folder cannot be read.
      Monitor::get().runDetached(
          [unfinished = std::move(unfinished), body = std::move(body)] { body(); });
    }
  }

  static std::string notCome(const std::vector<int64_t>& ranks) {
    return ranks.size() == 1 ? "rank " + asRuns(ranks) + " has not come"
                             : "ranks " + asRuns(ranks) + " have not come";
  }

  // Shows this wait to the other processes of this host, and to the processes that meet this one.
  void enlistSelf() {
    {
      LockGuard lock(mutex_);
      if (!ended_ && !server_) {
        server_ = serveStatus({meeting(), wait.self});
        installLastWords();
      }
    }
    meeting_->come();
    listed_ = true;
  }

  Known ofMeeting() {
    Known known;
    try {
      meeting_->come();
      listed_ = true;
      const auto come = meeting_->ranks();
      std::ranges::copy_if(wait.ranks, std::back_inserter(known.missing), [&](int64_t rank) {
        return !come.contains(rank);
      });
      known.text = known.missing.empty() ? "all ranks have come" : notCome(known.missing);
    } catch (const c10::DistError&) {
      known.text = "no process serves the store at " + meeting_->address();
    }
    return known;
  }

  // Prints the verdict. Raises the status's errors.
  void tell() {
    std::string text;
    std::vector<int64_t> missing;
    std::optional<int64_t> first;
    if (meeting_) {
      const auto before = ofMeeting();
      if (!before.missing.empty()) {
        std::this_thread::sleep_for(learning() + kMargin);
      }
      auto known = ofMeeting();
      text = wait.text + ", begun " + inSeconds(age()) + " ago on rank " +
             std::to_string(wait.self) + " at " + wait.calledAt + ": " + known.text;
      missing = std::move(known.missing);
    } else if (auto found = explain(wait.text, kAskingOthers)) {
      text = std::move(found->wait.verdict);
      missing = std::move(found->wait.waitsFor);
      first = found->first;
    }
    LockGuard lock(mutex_);
    if (!ended_ && !text.empty()) {
      // One rank prints the places of all.
      printLine(
          "torchcomms_pg: verdict: " +
          (first ? text.substr(0, text.find('\n')) + " (the rest: the output of rank " +
                       std::to_string(*first) + ", or python -m torchcomms_pg.status)"
                 : text));
      written_ = "torchcomms_pg: " + text;
      error_file::write(written_, missing);
    }
  }

  std::shared_ptr<Meeting> meeting_;  // null if the ranks have a group
  std::atomic<bool> tried_{false};    // a thread puts this rank on the meeting's list
  std::atomic<bool> listed_{false};   // it is there

  bool told_ GUARDED_BY(monitorThread) = false;
  Clock::time_point nextTry_ GUARDED_BY(monitorThread){};

  Mutex mutex_;
  bool ended_ GUARDED_BY(mutex_) = false;
  std::string written_ GUARDED_BY(mutex_);  // the verdict that has been printed, or ""
  // Serves this wait until it ends.
  std::shared_ptr<status::StatusServer> server_ GUARDED_BY(mutex_);
};

struct Entries {
  Mutex mutex;
  uint64_t last GUARDED_BY(mutex) = 0;
  std::map<uint64_t, std::shared_ptr<Entry>> all GUARDED_BY(mutex);
};
PerProcess<Entries> entries;

std::vector<std::shared_ptr<Entry>> current() {
  std::vector<std::shared_ptr<Entry>> all;
  auto& known = entries.get();
  LockGuard lock(known.mutex);
  for (const auto& [number, entry] : known.all) {
    all.push_back(entry);
  }
  return all;
}

}  // namespace

uint64_t begin(OtherWait wait) {
  const bool watched = wait.verdictAfter.count() > 0 || wait.place;
  std::shared_ptr<Entry> entry;
  if (watched) {
    try {
      entry = Monitor::watch<Entry>(wait);
    } catch (const std::runtime_error&) {
      // No thread can be started: the process prints nothing, but goes on.
    }
  }
  if (!entry) {
    entry = std::make_shared<Entry>(std::move(wait));
  }
  auto& known = entries.get();
  LockGuard lock(known.mutex);
  known.all.emplace(++known.last, std::move(entry));
  return known.last;
}

void end(uint64_t number, bool joined) {
  std::shared_ptr<Entry> entry;
  {
    auto& known = entries.get();
    LockGuard lock(known.mutex);
    if (auto found = known.all.extract(number)) {
      entry = std::move(found.mapped());
    }
  }
  if (entry) {  // a forked child has none of its parent's waits
    entry->end(joined);
  }
}

std::string lastWords(Clock::time_point at) {
  std::shared_ptr<Entry> longest;
  for (auto& entry : current()) {
    if (entry->wait.meets && entry->since < at && (!longest || entry->since < longest->since)) {
      longest = std::move(entry);
    }
  }
  if (!longest || at - longest->since < kLeastTold) {
    return "";
  }
  const auto text = longest->wait.text + " had waited " +
                    inSeconds(std::chrono::duration_cast<Milliseconds>(at - longest->since)) +
                    ", called at " + longest->wait.calledAt;
  try {
    auto missing = apart([longest] { return longest->missing(kLastAsking); });
    return text + (missing.wait_for(kLastAsking) == std::future_status::ready ? missing.get() : "");
  } catch (const std::exception&) {
    return text;  // the status's folder cannot be read, or no thread can be started
  }
}

std::vector<Wait> ofDiagnosis() {
  std::vector<Wait> waits;
  for (const auto& entry : current()) {
    if (entry->wait.ranks.empty()) {
      continue;  // it is not known for whom this rank waits
    }
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
    auto& told = waits.emplace_back(entry->wait);
    told.ageMs = entry->age().count();
    told.meeting = entry->meeting();
  }
  return waits;
}

}  // namespace torchcomms_pg::other_waits
