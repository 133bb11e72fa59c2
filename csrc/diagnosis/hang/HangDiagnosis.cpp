#include "diagnosis/hang/HangDiagnosis.hpp"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/Text.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

using std::chrono::milliseconds;

// How much earlier a failure's reason may arrive than the diagnosis that led to it, if rings go
// through the store.
constexpr milliseconds kLagging{200};

// RunningTime after which a step counts as hanging in the store, if a thread waits for a failure's
// reason. Also the limit of the waits for the request for dumps and for a verdict's end.
constexpr milliseconds kStuck{1000};

// Interval at which a waiting thread looks at the time.
constexpr milliseconds kLook{100};

}  // namespace

HangDiagnosis::HangDiagnosis(std::unique_ptr<SharedBoard> board, Options options)
    : protocol_(std::move(board), std::move(options)), options_(protocol_.options()) {}

std::shared_ptr<HangDiagnosis> HangDiagnosis::open(
    std::unique_ptr<SharedBoard> board, Options options) {
  options.print = [rank = options.number](const std::string& text) {
    printLine("[rank " + rank + "] torchcomms_pg: " + text);
  };
  return std::shared_ptr<HangDiagnosis>(new HangDiagnosis(std::move(board), std::move(options)));
}

std::shared_ptr<HangDiagnosis> HangDiagnosis::openWithoutThread(
    std::unique_ptr<SharedBoard> board, Options options) {
  std::shared_ptr<HangDiagnosis> made(new HangDiagnosis(std::move(board), std::move(options)));
  const LockGuard lock(made->mutex_);
  made->running_ = true;
  return made;
}

void HangDiagnosis::close() {
  LockGuard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void HangDiagnosis::wake() {
  if (!running_ && !closed_ && broken_.empty()) {
    // Detached, not joined: the thread may be blocked in the store for any time.
    Monitor::get().runDetached([self = shared_from_this()] {
      pthread_setname_np(pthread_self(), "tcpg_verdict");
      self->run();
    });
    running_ = true;
  }
  changed_.notify_all();
}

void HangDiagnosis::put(const DiagnosisRequest& request, Clock::time_point now) {
  asked_ = request;
  askedAt_ = clock_.at(now);
  wake();
}

std::string HangDiagnosis::tooLong(Clock::duration since, Clock::time_point now) {
  const auto ran = clock_.at(now);
  return stepping_ && ran - std::max(*stepping_, since) >= kPatience
             ? "the store has not answered for " + inSeconds(kPatience)
         : ran - std::max(foundAt_, since) >= kLimit + protocol_.slack()
             ? "the ranks have not found a verdict within " + inSeconds(kLimit + protocol_.slack())
             : "";
}

std::optional<Verdict> HangDiagnosis::ask(const DiagnosisRequest& request, Clock::time_point now) {
  LockGuard lock(mutex_);
  if (verdict_ && options_.goesOn && !isSameOperation(verdictOn_, request.wait)) {
    verdict_.reset();  // it is about an earlier operation
  }
  if (verdict_) {
    auto verdict = *verdict_;
    if (verdict.extensionMs > 0 || options_.goesOn) {
      verdict_.reset();  // the next verdict may differ
    }
    return verdict;
  }
  if (!broken_.empty()) {
    return printUnknown(broken_, request);
  }
  if (!asked_) {
    put(request, now);
  } else if (const auto why = tooLong(askedAt_, now); !why.empty()) {
    asked_.reset();
    return printUnknown(why, request);
  } else {
    if (isSameOperation(asked_->wait, request.wait)) {
      asked_->ended = request.ended;
    }
    if (!running_) {
      wake();  // no thread could be started before
    }
  }
  return std::nullopt;
}

std::optional<Verdict> HangDiagnosis::final() const {
  LockGuard lock(mutex_);
  return verdict_ && verdict_->extensionMs == 0 ? verdict_ : std::nullopt;
}

std::optional<DiagnosisProtocol::Standing> HangDiagnosis::standing() const {
  LockGuard lock(mutex_);
  return standing_;
}

Verdict HangDiagnosis::standingVerdict() const {
  LockGuard lock(mutex_);
  return told_;
}

void HangDiagnosis::end(const std::string& text) {
  LockGuard lock(mutex_);
  if (led_ && !end_) {
    end_ = text;
    wake();
  }
}

void HangDiagnosis::awaitEnd() {
  UniqueLock lock(mutex_);
  changed_.wait_for(
      lock, kStuck, [&]() REQUIRES(mutex_) { return (!end_ && !stepping_) || !broken_.empty(); });
}

void HangDiagnosis::notice() {
  LockGuard lock(mutex_);
  noticed_ = true;
  wake();
}

void HangDiagnosis::answer(Snapshot snapshot) {
  LockGuard lock(mutex_);
  wantsStatus_.store(false, std::memory_order_release);
  snapshot_ = std::move(snapshot);
  changed_.notify_all();
}

Verdict HangDiagnosis::await(const DiagnosisRequest& request, const std::function<bool()>& ended) {
  UniqueLock lock(mutex_);
  const auto known = [&]() REQUIRES(mutex_) { return verdict_ || !broken_.empty() || closed_; };
  const auto since = clock_.at(Clock::now());
  std::string why;
  while (!known() && why.empty()) {
    if (!asked_) {
      put(request, Clock::now());  // again if another thread has taken the verdict
    } else if (ended && isSameOperation(asked_->wait, request.wait)) {
      asked_->ended = ended();
    }
    changed_.wait_for(lock, kLook);
    why = tooLong(since, Clock::now());
  }
  if (verdict_) {
    auto verdict = *verdict_;
    if (verdict.extensionMs > 0) {
      verdict_.reset();
    }
    return verdict;
  }
  return printUnknown(
      closed_            ? "the group was closed meanwhile"
      : !broken_.empty() ? broken_
                         : why,
      request);
}

std::optional<Verdict> HangDiagnosis::awaitOthers() {
  UniqueLock lock(mutex_);
  const auto ran = [&]() REQUIRES(mutex_) { return clock_.at(Clock::now()); };
  const auto until = ran() + (options_.slack ? kLagging : milliseconds(0));
  const auto end = ran() + kPatience;
  const auto known = [&]() REQUIRES(mutex_) {
    return closed_ || !broken_.empty() || (verdict_ && verdict_->extensionMs == 0);
  };
  const auto hangs = [&]() REQUIRES(mutex_) {
    return stepping_ && clock_.at(Clock::now()) - *stepping_ > kStuck;
  };
  do {
    const auto looked = looked_;
    noticed_ = true;
    wake();
    while (!known() && looked_ == looked && !hangs() && ran() < end) {
      changed_.wait_for(lock, kLook);
    }
  } while (!known() && !hangs() && ran() < until);
  if (!known() && hangs() && asked_) {
    return unknownVerdict("the store does not answer", *asked_);
  }
  return verdict_ && verdict_->extensionMs == 0 ? verdict_ : std::nullopt;
}

void HangDiagnosis::askForDumps() {
  UniqueLock lock(mutex_);
  dumpsWanted_ = true;
  wake();
  changed_.wait_for(lock, kStuck, [&]() REQUIRES(mutex_) {
    return !dumpsWanted_ || closed_ || !broken_.empty();
  });
}

DiagnosisProtocol::Wanted HangDiagnosis::take() {
  DiagnosisProtocol::Wanted wanted;
  wanted.request = asked_;
  noticed_ = noticed_ && !protocol_.idle();
  wanted.dumps = dumpsWanted_;
  if (protocol_.wantsStatus()) {
    wanted.status = std::exchange(snapshot_, std::nullopt);
  }
  wanted.end = std::exchange(end_, std::nullopt);
  return wanted;
}

void HangDiagnosis::tell(const DiagnosisProtocol::Outcome& outcome) const {
  for (const auto& text : outcome.ends) {
    options_.print(text);
  }
  if (outcome.verdict && outcome.verdict->extensionMs == 0 && !outcome.over) {
    options_.print(outcome.own ? outcome.verdict->text : printedElsewhere(*outcome.verdict));
  }
}

Verdict HangDiagnosis::printUnknown(const std::string& why, const DiagnosisRequest& request) const {
  auto verdict = unknownVerdict(why, request);
  options_.print(verdict.text);
  return verdict;
}

void HangDiagnosis::apply(const DiagnosisProtocol::Outcome& outcome) {
  broken_ = outcome.broken;
  if (outcome.askedForDumps) {
    dumpsWanted_ = false;
  }
  standing_ = protocol_.standing();
  led_ = protocol_.ledStanding();
  if (!standing_) {
    told_ = {};
  } else if (outcome.verdict && outcome.verdict->extensionMs == 0 && !outcome.over) {
    told_ = *outcome.verdict;
  }
  if (outcome.ended) {
    const auto& verdict = outcome.verdict;
    const bool final = verdict && verdict->extensionMs == 0;
    // An extension holds only for the operation that the leader asked about.
    const bool answers =
        verdict && asked_ && (final || isSameOperation(verdict->about, asked_->wait));
    if ((final && !options_.goesOn) || answers) {
      verdict_ = verdict;
      verdictOn_ = asked_ ? asked_->wait : Wait();
    }
    if (answers) {
      asked_.reset();
    }
    if (verdict) {
      foundAt_ = clock_.ran();
    }
    snapshot_.reset();
    noticed_ = options_.goesOn || !final;  // the others may be in the next round
  }
  looked_ += outcome.looked ? 1 : 0;
  if (outcome.rings) {
    ring_.store(true, std::memory_order_release);
  }
  wantsStatus_.store(protocol_.wantsStatus() && !snapshot_, std::memory_order_release);
  changed_.notify_all();
}

bool HangDiagnosis::wanted() const {
  return asked_ || noticed_ || dumpsWanted_ || end_;
}

std::optional<HangDiagnosis::Clock::time_point> HangDiagnosis::next(Clock::time_point now) const {
  return !protocol_.idle() ? std::optional(now + protocol_.tick())
         : wanted()        ? std::optional(now)
         : standing_       ? std::optional(DiagnosisProtocol::nextLook(now))
                           : std::nullopt;
}

std::optional<HangDiagnosis::Clock::time_point> HangDiagnosis::due(Clock::time_point now) const {
  LockGuard lock(mutex_);
  return next(now);
}

void HangDiagnosis::step(Clock::time_point now) {
  UniqueLock lock(mutex_);
  auto wanted = take();
  stepping_ = clock_.at(now);
  lock.unlock();
  const auto outcome = protocol_.step(std::move(wanted), now);
  tell(outcome);
  lock.lock();
  stepping_.reset();
  apply(outcome);
}

void HangDiagnosis::run() {
  UniqueLock lock(mutex_);
  while (!closed_ && broken_.empty()) {
    const auto at = next(Clock::now());
    if (!at) {
      break;
    }
    if (protocol_.idle()) {
      changed_.wait_until(lock, *at, [&]() REQUIRES(mutex_) { return wanted() || closed_; });
    } else {
      changed_.wait_until(lock, *at);  // or until the monitor has answered
    }
    if (!closed_) {
      lock.unlock();
      try {
        step(Clock::now());
      } catch (const std::exception&) {
        std::this_thread::sleep_for(protocol_.tick());  // out of memory
      }
      lock.lock();
    }
  }
  running_ = false;
  changed_.notify_all();
}

}  // namespace torchcomms_pg
