#include "diagnosis/hang/Parting.hpp"

#include <algorithm>

#include "diagnosis/rank/Fields.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg {

namespace {

// The leader asks the other rank twice: for its place, then for values.
constexpr int kQuestions = 2;

struct Message {
  std::string step;
  std::string group;
  uint64_t number = 0;
  int64_t rank = 0;
  std::string text;

  static void fields(auto& self, auto& visit) {
    visit(self.step, self.group, self.number, self.rank, self.text);
  }
};

std::string questionKey(const std::string& prefix, int rank, int number) {
  return prefix + "asked/" + std::to_string(rank) + "/" + std::to_string(number);
}

std::string answerKey(const std::string& prefix, int rank, int number) {
  return prefix + "told/" + std::to_string(rank) + "/" + std::to_string(number);
}

// Returns the rank to compare with `own`, or -1.
int peerOf(int own, const std::map<int, RankStatus>& answers, const Verdict& verdict) {
  const auto& mine = answers.at(own);
  const auto differs = [&](const RankStatus& other) {
    return other.currentSeq != mine.currentSeq || other.signature != mine.signature;
  };
  const auto& named = verdict.ranks.empty() ? verdict.missing : verdict.ranks;
  const auto isNamed = [&](int rank) { return std::ranges::find(named, rank) != named.end(); };
  int other = -1;
  int ofAnotherSize = -1;  // a group that compares sizes itself leaves them out of the signature
  for (const auto& [rank, answer] : answers) {
    if (rank == own || !answer.failure.empty()) {
      continue;
    }
    if (differs(answer)) {
      if (isNamed(rank) != isNamed(own)) {
        return rank;
      }
      other = other < 0 ? rank : other;
    } else if (ofAnotherSize < 0 && answer.current != mine.current) {
      ofAnotherSize = rank;
    }
  }
  return other < 0 ? ofAnotherSize : other;
}

// Returns the ranks that are where `rank` is.
std::vector<int> placedLike(int rank, const std::map<int, RankStatus>& answers) {
  std::vector<int> ranks;
  const auto& own = answers.at(rank);
  for (const auto& [other, answer] : answers) {
    const bool same =
        answer.current == own.current && answer.calledAt == own.calledAt && !own.calledAt.empty();
    if (other == rank || same) {
      ranks.push_back(other);
    }
  }
  return ranks;
}

}  // namespace

void addParting(Verdict& verdict, const std::string& parting) {
  const auto end = parting.find('\n');
  if (end == std::string::npos) {
    return;
  }
  std::string lines;
  for (const char c : parting.substr(end)) {
    lines += c == '\n' ? "\n  " : std::string(1, c);
  }
  verdict.text.insert(std::min(verdict.text.find('\n'), verdict.text.size()), lines);
  verdict.parting = parting;
}

Parting::Parting(
    const DiagnosisRequest& request, const std::map<int, RankStatus>& answers,
    const Verdict& verdict, std::string prefix)
    : prefix_(std::move(prefix)), group_(request.group), number_(request.seq) {
  const bool hangs = verdict.extensionMs == 0 && !verdict.arrived;
  if (!PartingQuestion::known() || !hangs || number_ == 0 || answers.count(request.rank) == 0) {
    return;
  }
  peer_ = peerOf(request.rank, answers, verdict);
  if (peer_ < 0) {
    return;
  }
  const auto global = [&](int rank) {
    const auto& all = request.globalRanks;
    return static_cast<size_t>(rank) < all.size() ? all[rank] : rank;
  };
  rank_ = global(request.rank);
  peersRank_ = global(peer_);
  for (const int rank : {request.rank, peer_}) {
    names_.push_back(nameRanks(request, placedLike(rank, answers)));
    names_.push_back(nameRanks(request, {rank}));
  }
  step_ = Step::ask;
}

PartingQuestion::Asked Parting::asked(
    const std::string& step, std::vector<std::string> texts) const {
  return {step, group_, number_, rank_, std::move(texts)};
}

bool Parting::step(SharedBoard& board) {
  switch (step_) {
    case Step::ask:
      board.set(
          questionKey(prefix_, peer_, 1),
          fields::write(Message{"tell", group_, number_, peersRank_, ""}));
      step_ = Step::compare;
      break;
    case Step::compare:
      if (!question_) {
        if (const auto told = board.get(answerKey(prefix_, peer_, 1))) {
          std::vector<std::string> texts{*told};
          texts.insert(texts.end(), names_.begin(), names_.end());
          question_.emplace(asked("compare", std::move(texts)));
        }
      } else if (const auto wanted = question_->answer()) {
        question_.reset();
        step_ = wanted->empty() ? Step::over : Step::read;
        if (step_ == Step::read) {
          board.set(
              questionKey(prefix_, peer_, 2),
              fields::write(Message{"read", group_, number_, peersRank_, *wanted}));
        }
      }
      break;
    case Step::read:
      if (const auto told = board.get(answerKey(prefix_, peer_, 2))) {
        question_.emplace(asked("conclude", {*told}));
        step_ = Step::conclude;
      }
      break;
    case Step::conclude:
      if (auto found = question_->answer()) {
        result_ = *std::move(found);
        step_ = Step::over;
      }
      break;
    case Step::over: break;
  }
  return step_ == Step::over;
}

void Parting::tell(Verdict& verdict) const {
  addParting(verdict, printable(result_));
}

void PartingAnswers::step(SharedBoard& board, const std::string& prefix, int rank) {
  if (answered_ == kQuestions || !PartingQuestion::known()) {
    return;
  }
  const int number = answered_ + 1;
  if (!question_) {
    const auto text = board.get(questionKey(prefix, rank, number));
    if (const auto message = text ? fields::read<Message>(*text) : std::nullopt) {
      question_.emplace(
          PartingQuestion::Asked{
              message->step, message->group, message->number, message->rank, {message->text}});
    }
  }
  if (question_) {
    if (const auto told = question_->answer()) {
      question_.reset();
      answered_ = number;
      board.set(answerKey(prefix, rank, number), *told);
    }
  }
}

}  // namespace torchcomms_pg
