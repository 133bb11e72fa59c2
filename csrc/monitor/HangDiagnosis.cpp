#include "monitor/HangDiagnosis.hpp"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/Thread.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

using std::chrono::milliseconds;

// Interval at which a rank looks at the board during a diagnosis; its minimum for each rank of the
// group, since all ranks use one store; and the length of a turn between diagnoses.
constexpr milliseconds kTick{20};
constexpr std::chrono::microseconds kTickOfRank{100};
constexpr milliseconds kTurn{1000};

// Limits from the start of a diagnosis: for the answers, and for another rank's verdict. A rank
// needs up to a second to answer. If the library cannot ring all ranks, it needs another second to
// notice the diagnosis.
constexpr milliseconds kGather{2500};
constexpr milliseconds kFollow{3200};

// Limit of the time for which a rank with the verdict waits until the others have read it: if its
// process serves the store, the store ends with it.
constexpr milliseconds kParting{500};

constexpr milliseconds kLagging{200};

// Time after which a call to the store counts as hanging, and other ranks' messages in the store
// are not awaited any longer.
constexpr milliseconds kStuck{1000};

void print(const std::string& rank, const std::string& text) {
  printLine("[rank " + rank + "] torchcomms_pg: " + text);
}

Verdict unknown(const std::string& why) {
  Verdict verdict;
  verdict.text = "verdict: it cannot be known what the other ranks do: " + why;
  return verdict;
}

Verdict printUnknown(const std::string& rank, const std::string& why) {
  auto verdict = unknown(why);
  print(rank, verdict.text);
  return verdict;
}

std::string sinceLongAgo() {
  return "the store has not answered for " +
         std::to_string(HangDiagnosis::kPatience.count() / 1000) + " s";
}

}  // namespace

std::shared_ptr<HangDiagnosis> HangDiagnosis::open(
    std::unique_ptr<SharedBoard> board, Options options) {
  std::shared_ptr<HangDiagnosis> made(new HangDiagnosis(std::move(board), std::move(options)));
  if (made->options_.poll) {
    std::lock_guard lock(made->mutex_);
    made->wake();
  }
  return made;
}

HangDiagnosis::HangDiagnosis(std::unique_ptr<SharedBoard> board, Options options)
    : board_(std::move(board)), options_(std::move(options)) {}

void HangDiagnosis::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

// Called with mutex_ held.
void HangDiagnosis::wake() {
  if (!running_ && !closed_ && broken_.empty()) {
    // Detached, not joined: the thread may be blocked in the store for any time.
    if (options_.poll) {
      startDetached("tcpg_verdict", "verdicts", [self = shared_from_this()] { self->run(); });
    } else {
      Monitor::get().runDetached([self = shared_from_this()] {
        pthread_setname_np(pthread_self(), "tcpg_verdict");
        self->run();
      });
    }
    running_ = true;
  }
  changed_.notify_all();
}

void HangDiagnosis::put(const DiagnosisRequest& request) {
  asked_ = request;
  askedAt_ = Clock::now();
  wake();
}

std::optional<Verdict> HangDiagnosis::ask(const DiagnosisRequest& request) {
  std::lock_guard lock(mutex_);
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
    return printUnknown(options_.number, broken_);
  }
  if (!asked_) {
    put(request);
  } else if (Clock::now() - askedAt_ >= kPatience) {
    return printUnknown(options_.number, sinceLongAgo());
  } else if (isSameOperation(asked_->wait, request.wait)) {
    asked_->ended = request.ended;
  }
  return std::nullopt;
}

std::optional<Verdict> HangDiagnosis::final() const {
  std::lock_guard lock(mutex_);
  return verdict_ && verdict_->extensionMs == 0 ? verdict_ : std::nullopt;
}

std::optional<HangDiagnosis::Clock::time_point> HangDiagnosis::standing() const {
  std::lock_guard lock(mutex_);
  return standing_ ? std::optional(standing_->since) : std::nullopt;
}

void HangDiagnosis::end(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (standing_ && standing_->led && !standing_->end) {
    standing_->end = text;
    wake();
  }
}

void HangDiagnosis::notice() {
  std::lock_guard lock(mutex_);
  noticed_ = true;
  wake();
}

void HangDiagnosis::answer(Snapshot snapshot) {
  std::lock_guard lock(mutex_);
  wantsStatus_.store(false, std::memory_order_release);
  snapshot_ = std::move(snapshot);
  changed_.notify_all();
}

Verdict HangDiagnosis::await(const DiagnosisRequest& request) {
  std::unique_lock lock(mutex_);
  if (!verdict_ && broken_.empty() && !asked_) {
    put(request);
  }
  changed_.wait_for(lock, kPatience, [&] { return verdict_ || !broken_.empty() || closed_; });
  if (verdict_) {
    auto verdict = *verdict_;
    if (verdict.extensionMs > 0) {
      verdict_.reset();
    }
    return verdict;
  }
  return printUnknown(
      options_.number,
      closed_            ? "the group was closed meanwhile"
      : !broken_.empty() ? broken_
                         : sinceLongAgo());
}

std::optional<Verdict> HangDiagnosis::awaitOthers() {
  // If the library cannot ring all ranks, a failure's reason may arrive before its diagnosis.
  const auto until = Clock::now() + (options_.poll ? kLagging : milliseconds(0));
  const auto end = Clock::now() + kPatience;  // a limit for calls of the store, which may have none
  std::unique_lock lock(mutex_);
  const auto known = [&] {
    return closed_ || !broken_.empty() || (verdict_ && verdict_->extensionMs == 0);
  };
  const auto hangs = [&] { return stepping_ && Clock::now() - *stepping_ > kStuck; };
  do {
    const auto looked = looked_;
    noticed_ = true;
    wake();
    while (!known() && looked_ == looked && !hangs() && Clock::now() < end) {
      changed_.wait_for(lock, kStuck / 10);
    }
  } while (!known() && !hangs() && Clock::now() < until);
  if (!known() && hangs() && asked_) {
    return unknown("the store does not answer");
  }
  return verdict_ && verdict_->extensionMs == 0 ? verdict_ : std::nullopt;
}

void HangDiagnosis::askForDumps() {
  std::unique_lock lock(mutex_);
  dumpsWanted_ = true;
  wake();
  changed_.wait_for(lock, kStuck, [&] { return !dumpsWanted_ || closed_ || !broken_.empty(); });
}

void HangDiagnosis::run() {
  std::unique_lock lock(mutex_);
  while (!closed_ && broken_.empty()) {
    const auto something = [&] {
      return asked_ || noticed_ || dumpsWanted_ || closed_ || (standing_ && standing_->end);
    };
    if (phase_ == Phase::idle && !something()) {
      if (!options_.poll && !standing_) {
        break;
      }
      changed_.wait_until(lock, nextTurn(), something);
    }
    if (closed_) {
      break;
    }
    stepping_ = Clock::now();
    lock.unlock();
    try {
      step(Clock::now());
    } catch (const std::exception& error) {
      const std::string what = error.what();
      lock.lock();
      broken_ = "the store is gone (" + what.substr(0, what.find('\n')) + ")";
      const bool asked = asked_.has_value();
      lock.unlock();
      finish(asked && !round_.verdict ? unknown(broken_) : round_.verdict);
    }
    lock.lock();
    stepping_.reset();
    if (phase_ != Phase::idle) {
      changed_.wait_for(
          lock, std::max<std::chrono::microseconds>(kTick, options_.ranks.size() * kTickOfRank));
    }
  }
  running_ = false;
  changed_.notify_all();
}

// Returns the start of this rank's next turn. The processes of a host share the clock, and so take
// turns.
HangDiagnosis::Clock::time_point HangDiagnosis::nextTurn() const {
  const auto round = kTurn * options_.turns;
  const auto first = Clock::time_point(kTurn * options_.turn);
  return first + ((Clock::now() - first) / round + 1) * round;
}

void HangDiagnosis::step(Clock::time_point now) {
  switch (phase_) {
    case Phase::idle: look(now); break;
    case Phase::answering: publish(now); break;
    case Phase::leading: lead(now); break;
    case Phase::following: follow(now); break;
    case Phase::parting: part(now); break;
  }
}

// Looks for a diagnosis. If this rank was busy or looks late, the diagnosis may be over, and its
// verdict is on the board.
void HangDiagnosis::look(Clock::time_point now) {
  bool asked = false;
  bool wanted = false;
  bool noticed = false;
  {
    std::lock_guard lock(mutex_);
    asked = asked_.has_value();
    noticed = std::exchange(noticed_, false);
    wanted = dumpsWanted_;
  }
  endStanding();
  bool news = options_.poll && options_.poll(/*thorough=*/noticed || asked);
  news = lookForDumps(wanted) || news;
  const bool leads = asked && board_->claim(key("leader"), std::to_string(options_.rank));
  const bool goesOn = asked || board_->get(key("leader"));
  // A rank that learned of the diagnosis by a ring does not ring again.
  if (leads || (options_.poll && !noticed && (news || goesOn))) {
    ring_.store(true, std::memory_order_release);
  }
  if (!goesOn) {
    std::lock_guard lock(mutex_);
    ++looked_;
    changed_.notify_all();
    return;
  }
  round_ = Round();
  round_.leads = leads;
  round_.begun = now;
  phase_ = Phase::answering;
  wantsStatus_.store(true, std::memory_order_release);
}

// Ends the standing verdict, if the rank that led to it has said so.
void HangDiagnosis::endStanding() {
  std::optional<Standing> standing;
  {
    std::lock_guard lock(mutex_);
    standing = standing_;
  }
  if (!standing) {
    return;
  }
  if (standing->end) {
    board_->set(standing->key, *standing->end);
  } else if (!standing->led) {
    standing->end = board_->get(standing->key);
  }
  if (standing->end) {
    print(options_.number, *standing->end);
    std::lock_guard lock(mutex_);
    standing_.reset();
  }
}

// Asks for dumps if `wanted`. Otherwise dumps if another rank has asked, and returns whether it
// has.
bool HangDiagnosis::lookForDumps(bool wanted) {
  if (wanted) {
    dumps_ = board_->add("dumps", 1);
    std::lock_guard lock(mutex_);
    dumpsWanted_ = false;
    changed_.notify_all();
  } else if (options_.dump && board_->get("dumps")) {
    const auto asked = board_->add("dumps", 0);
    if (asked > dumps_) {
      dumps_ = asked;
      options_.dump();
      return true;
    }
  }
  return false;
}

void HangDiagnosis::publish(Clock::time_point now) {
  if (!round_.stacks) {
    std::lock_guard lock(mutex_);
    if (!snapshot_) {
      return;  // the monitor provides it in its next round
    }
    round_.answer = std::move(snapshot_->answer);
    round_.stacks.emplace(PythonStackDump::Stacks{std::move(snapshot_->stack)});
    snapshot_.reset();
  }
  if (!round_.stacks->ready()) {
    return;
  }
  auto& answer = round_.answer;
  auto told = round_.stacks->tell();
  answer.threads = std::move(told.threads);
  answer.calledAt = told.calledAt.empty() ? "" : std::move(told.calledAt.front());
  board_->set(key("answer/" + std::to_string(options_.rank)), encode(answer));
  round_.answers[options_.rank] = answer;
  phase_ = round_.leads ? Phase::leading : Phase::following;
  step(now);
}

void HangDiagnosis::lead(Clock::time_point now) {
  for (const int rank : options_.ranks) {
    if (round_.answers.count(rank) == 0) {
      if (const auto text = board_->get(key("answer/" + std::to_string(rank)))) {
        if (auto answer = decodeStatus(*text)) {
          round_.answers[rank] = std::move(*answer);
        }
      }
    }
  }
  if (round_.answers.size() < options_.ranks.size() && now - round_.begun < kGather) {
    return;
  }
  std::map<int, Silent> silent;
  for (const int rank : options_.ranks) {
    if (round_.answers.count(rank) == 0) {
      silent[rank] = options_.describeSilent(rank);
    }
  }
  std::optional<DiagnosisRequest> request;
  {
    std::lock_guard lock(mutex_);
    request = asked_;
  }
  auto verdict = judge(*request, round_.answers, silent);
  if (verdict.arrived && verdict.extensionMs == 0 && now - round_.begun < kGather) {
    return;  // the answers are of different times, and the operation may be about to end
  }
  round_.verdict = std::move(verdict);
  board_->set(key("verdict"), encode(*round_.verdict));
  phase_ = Phase::parting;
  step(now);
}

void HangDiagnosis::follow(Clock::time_point now) {
  if (const auto text = board_->get(key("verdict"))) {
    round_.verdict = decodeVerdict(*text);
    phase_ = Phase::parting;
    step(now);
    return;
  }
  if (now - round_.begun < kFollow) {
    return;
  }
  bool asked = false;
  {
    std::lock_guard lock(mutex_);
    asked = asked_.has_value();
  }
  if (asked) {
    phase_ = Phase::leading;  // the leader has written no verdict in time
  } else {
    finish(std::nullopt);
  }
}

void HangDiagnosis::part(Clock::time_point now) {
  const bool first = round_.read == Clock::time_point{};
  if (first) {
    round_.read = now;
  }
  const auto readers = board_->add(key("read"), first ? 1 : 0);
  const int answered = round_.verdict ? round_.verdict->answered : 0;
  if (readers >= answered || now - round_.read >= kParting) {
    finish(round_.verdict);
  }
}

// Returns whether this round's verdict has already been ended; false also if the board fails.
bool HangDiagnosis::isOver(const std::string& overKey) {
  try {
    return board_->get(overKey).has_value();
  } catch (const std::exception&) {
    return false;
  }
}

void HangDiagnosis::finish(const std::optional<Verdict>& verdict) {
  const bool final = verdict && verdict->extensionMs == 0;
  // A verdict that this rank reads late, for example after it was stopped, may have been ended
  // already.
  const auto overKey = key("over");
  const bool over = final && options_.goesOn && !round_.leads && isOver(overKey);
  if (final && !over) {
    print(options_.number, verdict->text);
  }
  std::lock_guard lock(mutex_);
  if ((final && !options_.goesOn) || (verdict && asked_)) {
    verdict_ = verdict;
    verdictOn_ = asked_ ? asked_->wait : Wait();
  }
  if (final && options_.goesOn && !over) {
    standing_ = Standing{overKey, round_.leads, Clock::now(), std::nullopt};
  }
  asked_.reset();
  snapshot_.reset();
  noticed_ = verdict && options_.goesOn;  // the others may be in the next diagnosis

  wantsStatus_.store(false, std::memory_order_release);
  rounds_ += verdict ? 1 : 0;
  round_ = Round();
  phase_ = Phase::idle;
  ++looked_;
  changed_.notify_all();
}

std::string HangDiagnosis::key(const std::string& name) const {
  return std::to_string(rounds_) + "/" + name;
}

}  // namespace torchcomms_pg
