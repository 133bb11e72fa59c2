#include "diagnosis/hang/DiagnosisProtocol.hpp"

#include <exception>
#include <utility>

#include "base/Races.hpp"

namespace torchcomms_pg {

namespace {

using std::chrono::milliseconds;

// kTick: interval at which a rank looks at the board during a diagnosis. In large groups the
// interval is kTickOfRank for each rank, since all ranks use one store. kStandingTick: interval at
// which a rank looks whether a standing verdict has been ended.
constexpr milliseconds kTick{20};
constexpr std::chrono::microseconds kTickOfRank{100};
constexpr milliseconds kStandingTick{1000};

// Limits from the start of a round, which all grow by Options::slack. kGather: for the answers. A
// rank needs up to a second to answer, and another second to notice the diagnosis if the ring goes
// through the store. kFollow: for another rank's verdict, if this rank has asked, too.
constexpr milliseconds kGather{2500};
constexpr milliseconds kFollow{3200};

// Time that a rank waits for its Python before it writes a preliminary answer. So a rank whose
// Python is slow never seems to be dead.
constexpr milliseconds kPreliminary{300};
// Limit from the start of a round for finding out where the ranks parted.
constexpr milliseconds kPart{1900};

// Time from the start of a round after which the leader declares the round void, and so does a rank
// that has not asked. So no verdict rests on answers older than this.
constexpr milliseconds kGiveUp{4500};

// Limit of the time for which a rank with the verdict waits until the others have read it. Its
// process may serve the store, which would end with the process.
constexpr milliseconds kParting{500};

// Stands in a verdict's place if the round is void. Not the encoding of a verdict.
constexpr const char* kVoid = "void";

// Text that ends a standing verdict when its leader has led to the next one. No rank prints it.
constexpr const char* kSuperseded = "";

}  // namespace

DiagnosisProtocol::DiagnosisProtocol(std::unique_ptr<SharedBoard> board, Options options)
    : board_(std::move(board)), options_(std::move(options)) {}

DiagnosisProtocol::Clock::time_point DiagnosisProtocol::nextLook(Clock::time_point now) {
  return Clock::time_point((now.time_since_epoch() / kStandingTick + 1) * kStandingTick);
}

std::chrono::microseconds DiagnosisProtocol::tick() const {
  return std::max<std::chrono::microseconds>(kTick, options_.ranks.size() * kTickOfRank);
}

DiagnosisProtocol::Outcome DiagnosisProtocol::step(Wanted wanted, Clock::time_point now) {
  wanted_ = std::move(wanted);
  outcome_ = Outcome();
  now_ = now;
  round_.ran.at(now_);
  try {
    if (wanted_.end) {
      endStanding();
    }
    advance();
  } catch (const std::exception& error) {
    const std::string what = error.what();
    outcome_.broken = "the store is gone (" + what.substr(0, what.find('\n')) + ")";
    auto verdict = round_.verdict;
    if (!verdict && wanted_.request) {
      verdict = unknownVerdict(outcome_.broken, *wanted_.request);
    }
    finish(verdict);
  }
  return std::exchange(outcome_, Outcome());
}

void DiagnosisProtocol::advance() {
  switch (phase_) {
    case Phase::idle: look(); break;
    case Phase::answering: publish(); break;
    case Phase::leading: lead(); break;
    case Phase::following: follow(); break;
    case Phase::parting: part(); break;
  }
}

// Looks for a diagnosis. If this rank was busy or looks late, the diagnosis may be over, and its
// verdict is on the board.
void DiagnosisProtocol::look() {
  const bool asked = wanted_.request.has_value();
  endStanding();
  if (options_.look) {
    options_.look();
  }
  lookForDumps();
  const bool leads = asked && board_->claim(key("leader"), std::to_string(options_.rank));
  const bool goesOn = asked || board_->get(key("leader"));
  outcome_.rings = leads || outcome_.askedForDumps;
  if (!goesOn) {
    outcome_.looked = true;
    return;
  }
  round_ = Round();
  round_.leads = leads;
  round_.begun = now_;
  round_.request = wanted_.request;
  round_.ran.at(now_);
  phase_ = Phase::answering;
}

// Ends the standing verdicts that the ranks which led to them have ended.
void DiagnosisProtocol::endStanding() {
  for (auto standing = standing_.begin(); standing != standing_.end();) {
    auto text =
        standing->led ? std::exchange(wanted_.end, std::nullopt) : board_->get(standing->key);
    if (!text) {
      ++standing;
      continue;
    }
    if (standing->led) {
      board_->set(standing->key, *text);
    }
    if (*text != kSuperseded) {
      outcome_.ends.push_back(*std::move(text));
    }
    standing = standing_.erase(standing);
  }
}

// Asks for dumps if they are wanted. Otherwise dumps if another rank has asked.
void DiagnosisProtocol::lookForDumps() {
  if (wanted_.dumps) {
    dumps_ = board_->add("dumps", 1);
    outcome_.askedForDumps = true;
  } else if (options_.dump && board_->get("dumps")) {
    const auto asked = board_->add("dumps", 0);
    if (asked > dumps_) {
      dumps_ = asked;
      options_.dump();
    }
  }
}

void DiagnosisProtocol::publish() {
  if (!round_.stacks) {
    if (!wanted_.status) {
      return;  // the monitor provides it in its next round
    }
    round_.answer = std::move(wanted_.status->answer);
    round_.stacks.emplace(PythonStackDump::Stacks{std::move(wanted_.status->stack)});
  }
  auto& answer = round_.answer;
  const bool ready = round_.stacks->ready();
  const auto waited = std::chrono::steady_clock::now() - round_.stacks->begun();
  if (ready || (waited >= kPreliminary && !round_.published)) {
    answer.preliminary = !ready;
    write();
  }
  if (!ready) {
    return;
  }
  round_.answers[options_.rank] = answer;
  phase_ = round_.leads ? Phase::leading : Phase::following;
  advance();
}

// Writes this rank's answer on the board, with what is known of Python.
void DiagnosisProtocol::write() {
  auto& answer = round_.answer;
  auto told = round_.stacks->tell();
  answer.threads = std::move(told.threads);
  for (auto& wait : answer.waits) {
    told.name(wait);
  }
  for (auto& counts : answer.counts) {
    told.forgetGone(counts);
  }
  answer.calledAt = told.calledAt.empty() ? "" : std::move(told.calledAt.front());
  board_->set(key("answer/" + std::to_string(options_.rank)), encode(answer));
  board_->add(key("answers"), 1);
  round_.published = true;
}

void DiagnosisProtocol::lead() {
  if (now_ - round_.begun >= kGiveUp + slack()) {
    races::mark(races::Race::leaderWasStopped);
    declareVoid();
    return;
  }
  const bool late = round_.ran.ran() >= kGather + slack();
  auto& request = *round_.request;
  if (wanted_.request && isSameOperation(wanted_.request->wait, request.wait)) {
    request.ended = wanted_.request->ended;
  }
  // Reads only new answers, and not each rank's key at each look: the store is one process.
  const auto told = board_->add(key("answers"), 0);
  for (const int rank : options_.ranks) {
    const auto known = round_.answers.find(rank);
    const bool complete = known != round_.answers.end() && !known->second.preliminary;
    if ((told != round_.told || late) && !complete) {
      const auto text = board_->get(key("answer/" + std::to_string(rank)));
      if (auto answer = text ? decodeStatus(*text) : std::nullopt) {
        round_.answers[rank] = std::move(*answer);
      }
    }
  }
  round_.told = told;
  const bool all = round_.answers.size() == options_.ranks.size() &&
                   std::ranges::none_of(round_.answers, [](const auto& answer) {
                     return answer.second.preliminary;
                   });
  if (!all && !late) {
    return;
  }
  SilentRanks silent;
  for (const int rank : options_.ranks) {
    if (round_.answers.count(rank) == 0) {
      silent[rank] = options_.describeSilent(rank);
    }
  }
  auto verdict = judge(request, round_.answers, silent);
  if (verdict.arrived && verdict.extensionMs == 0 && !late) {
    races::mark(races::Race::answersOfDifferentTimes);
    return;  // the answers are of different times, and the operation may be about to end
  }
  round_.verdict = std::move(verdict);  // this rank's, if the board fails now
  round_.own = true;
  if (!late && !round_.parting) {
    round_.parting.emplace(request, round_.answers, *round_.verdict, key(""));
  }
  if (round_.parting && round_.verdict->extensionMs == 0) {
    if (!round_.parting->step(*board_) && round_.ran.ran() < kPart + slack()) {
      return;
    }
    round_.parting->tell(*round_.verdict);
  }
  round_.wrote = board_->claim(key("verdict"), encode(*round_.verdict));
  if (round_.wrote) {
    if (round_.verdict->extensionMs == 0) {
      supersede();
    }
    part();
  } else {
    races::mark(races::Race::anotherVerdictWasFirst);
    read();
  }
}

void DiagnosisProtocol::follow() {
  const auto waited = now_ - round_.begun - slack();
  // Alternates, since all ranks use one store.
  if (std::exchange(round_.listens, !round_.listens && PartingQuestion::known())) {
    round_.partingAnswers.step(*board_, key(""), options_.rank);
    return;
  }
  if (read() || waited < kFollow) {
    return;
  }
  if (wanted_.request || waited >= kGiveUp) {
    races::mark(races::Race::leaderVanished);
    declareVoid();
  }
}

// Ends the round without a verdict, unless a rank has written one.
void DiagnosisProtocol::declareVoid() {
  board_->claim(key("verdict"), kVoid);
  read();
}

// Ends the standing verdict to which this rank led before: the new one takes its place.
void DiagnosisProtocol::supersede() {
  const auto led = std::ranges::find(standing_, true, &Standing::led);
  if (led != standing_.end()) {
    board_->set(led->key, kSuperseded);
    standing_.erase(led);
  }
}

// Ends the round if a rank has written a verdict, or that the round is void. Returns whether one
// has.
bool DiagnosisProtocol::read() {
  const auto text = board_->get(key("verdict"));
  if (!text) {
    return false;
  }
  round_.verdict = decodeVerdict(*text);
  round_.own = false;
  if (round_.verdict) {
    part();
  } else {
    finish(std::nullopt);
  }
  return true;
}

void DiagnosisProtocol::part() {
  phase_ = Phase::parting;
  const bool first = !round_.read;
  if (first) {
    round_.read = now_;
  }
  const auto readers = board_->add(key("read"), first ? 1 : 0);
  if (readers >= round_.verdict->answered || now_ - *round_.read >= kParting) {
    finish(round_.verdict);
  }
}

// Returns whether this round's verdict has already been ended; false also if the board fails.
bool DiagnosisProtocol::isOver(const std::string& overKey) {
  try {
    return board_->get(overKey).has_value();
  } catch (const std::exception&) {
    return false;
  }
}

void DiagnosisProtocol::finish(const std::optional<Verdict>& verdict) {
  if (verdict && verdict->extensionMs == 0 && options_.goesOn) {
    // This rank may read the verdict late, for example after it was stopped.
    const auto overKey = key("over");
    outcome_.over = outcome_.broken.empty() && !round_.wrote && isOver(overKey);
    if (outcome_.over) {
      races::mark(races::Race::verdictEndedBeforeItsRead);
    } else {
      standing_.push_back({overKey, round_.wrote, now_, verdict->about});
    }
  }
  outcome_.ended = true;
  outcome_.looked = true;
  outcome_.verdict = verdict;
  outcome_.own = round_.own;
  ++rounds_;
  round_ = Round();
  phase_ = Phase::idle;
}

std::string DiagnosisProtocol::key(const std::string& name) const {
  return std::to_string(rounds_) + "/" + name;
}

}  // namespace torchcomms_pg
