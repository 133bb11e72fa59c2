// The verdict of a diagnosis, for people. Independent of torch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/hang/Blame.hpp"

namespace torchcomms_pg {

struct Verdict {
  std::vector<int> ranks;  // ranks that hold up the operation, see Blame; sent as `runs`
  std::vector<Run> runs;
  std::string summary;    // the cause, for an error's first line; empty if unknown
  std::string text;       // 40 lines at most, whatever the number of ranks
  std::string printedBy;  // the rank that prints `text`, in words
  // if positive, no rank has failed: the ranks wait that much longer, for the reason in `text`
  int64_t extensionMs = 0;
  int answered = 0;     // number of ranks that have answered
  Wait about;           // the operation that the leader asked about
  std::string parting;  // where the ranks took different ways, see addParting(); or ""
  // The next two are known only to the rank that judges.
  bool arrived = false;      // true if all ranks have arrived
  std::vector<int> missing;  // ranks that have not arrived at the operation asked about

  static void fields(auto& self, auto& visit) {
    visit(
        self.runs, self.summary, self.extensionMs, self.answered, self.about, self.parting,
        self.text, self.printedBy);
  }
};

// Returns the verdict.
Verdict judge(const DiagnosisRequest& request, const Answers& answers, const SilentRanks& silent);

// Names ranks of the group, as verdicts do.
std::string nameRanks(const DiagnosisRequest& request, const std::vector<int>& ranks);

// Returns the lines of `text`, each after a line's end and indented by `blanks`.
std::string indented(const std::string& text, const std::string& blanks);

// Returns the verdict of a diagnosis that has failed.
Verdict unknownVerdict(const std::string& why, const DiagnosisRequest& request);

// Returns the line that the other ranks print: the first line of the text, and who prints the rest.
std::string printedElsewhere(const Verdict& verdict);

std::string encode(Verdict verdict);
// Returns nullopt if `text` is damaged or of another version.
std::optional<Verdict> decodeVerdict(const std::string& text);

}  // namespace torchcomms_pg
