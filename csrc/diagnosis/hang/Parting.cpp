#include "diagnosis/hang/Parting.hpp"

#include <algorithm>

#include "diagnosis/rank/Fields.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg {

namespace {

// The leader asks the other rank twice: for its place, then for values.
constexpr int kQuestions = 2;

// `what`: "asked" or "told".
std::string keyOf(const std::string& prefix, const char* what, int rank, int question) {
  return prefix + what + "/" + std::to_string(rank) + "/" + std::to_string(question);
}

// Returns the rank to compare with `own`, or -1.
int peerOf(int own, const Answers& answers, const Verdict& verdict) {
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
std::vector<int> placedLike(int rank, const Answers& answers) {
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
  verdict.text.insert(
      std::min(verdict.text.find('\n'), verdict.text.size()),
      indented(parting.substr(end + 1), "  "));
  verdict.parting = parting;
}

Parting::Parting(
    const DiagnosisRequest& request, const Answers& answers, const Verdict& verdict,
    std::string prefix)
    : prefix_(std::move(prefix)), group_(request.group), number_(request.seq) {
  const bool hangs = verdict.extensionMs == 0 && !verdict.arrived;
  if (!PartingQuestion::known() || !hangs || number_ == 0 || answers.count(request.rank) == 0) {
    return;
  }
  peer_ = peerOf(request.rank, answers, verdict);
  if (peer_ < 0) {
    return;
  }
  rank_ = request.global(request.rank);
  peersRank_ = request.global(peer_);
  for (const int rank : {request.rank, peer_}) {
    names_.push_back(nameRanks(request, placedLike(rank, answers)));
    names_.push_back(nameRanks(request, {rank}));
  }
  step_ = Step::ask;
}

void Parting::askPeer(
    SharedBoard& board, int question, const std::string& step, const std::string& text) const {
  const PartingQuestion::Asked asked{step, group_, number_, peersRank_, {text}};
  board.set(keyOf(prefix_, "asked", peer_, question), fields::write(asked));
}

void Parting::askHere(const std::string& step, std::vector<std::string> texts) {
  question_.emplace(PartingQuestion::Asked{step, group_, number_, rank_, std::move(texts)});
}

bool Parting::step(SharedBoard& board) {
  switch (step_) {
    case Step::ask:
      askPeer(board, 1, "tell", "");
      step_ = Step::compare;
      break;
    case Step::compare:
      if (!question_) {
        if (const auto told = board.get(keyOf(prefix_, "told", peer_, 1))) {
          std::vector<std::string> texts{*told};
          texts.insert(texts.end(), names_.begin(), names_.end());
          askHere("compare", std::move(texts));
        }
      } else if (const auto wanted = question_->answer()) {
        question_.reset();
        step_ = wanted->empty() ? Step::over : Step::read;
        if (step_ == Step::read) {
          askPeer(board, 2, "read", *wanted);
        }
      }
      break;
    case Step::read:
      if (const auto told = board.get(keyOf(prefix_, "told", peer_, 2))) {
        askHere("conclude", {*told});
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
    const auto text = board.get(keyOf(prefix, "asked", rank, number));
    if (auto asked = text ? fields::read<PartingQuestion::Asked>(*text) : std::nullopt) {
      question_.emplace(*std::move(asked));
    }
  }
  if (question_) {
    if (const auto told = question_->answer()) {
      question_.reset();
      answered_ = number;
      board.set(keyOf(prefix, "told", rank, number), *told);
    }
  }
}

}  // namespace torchcomms_pg
