// What a verdict says of where its ranks took different ways.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "diagnosis/hang/PartingQuestion.hpp"
#include "diagnosis/hang/SharedBoard.hpp"
#include "diagnosis/hang/Verdict.hpp"

namespace torchcomms_pg {

// Adds the place where the ranks took different ways to the verdict. `parting`: a line of JSON, a
// list of [file, line, function, statement], and then lines for people. Has no effect if it is "".
void addParting(Verdict& verdict, const std::string& parting);

// The leader's part: asks one other rank for more, and compares. Used by one thread.
class Parting {
 public:
  // Chooses the rank to compare with: one that others wait for, or that calls something else. If
  // no such rank exists, the talk is over at once. `prefix`: of the round's keys.
  Parting(
      const DiagnosisRequest& request, const Answers& answers, const Verdict& verdict,
      std::string prefix);

  // Does what is due. Returns whether the talk is over.
  bool step(SharedBoard& board);
  // Adds the result, if any, to the verdict.
  void tell(Verdict& verdict) const;

 private:
  enum class Step { ask, compare, read, conclude, over };

  void askPeer(
      SharedBoard& board, int question, const std::string& step, const std::string& text) const;
  void askHere(const std::string& step, std::vector<std::string> texts);

  std::string prefix_;
  std::string group_;
  uint64_t number_ = 0;
  int64_t rank_ = 0;
  int peer_ = -1;
  int64_t peersRank_ = 0;
  std::vector<std::string> names_;
  Step step_ = Step::over;
  std::optional<PartingQuestion> question_;
  std::string result_;
};

// The other ranks' part: answers the leader's questions. Used by one thread.
class PartingAnswers {
 public:
  // Looks for a question to this rank, and answers it when Python has.
  void step(SharedBoard& board, const std::string& prefix, int rank);

 private:
  int answered_ = 0;
  std::optional<PartingQuestion> question_;
};

}  // namespace torchcomms_pg
