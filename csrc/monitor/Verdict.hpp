// The verdict of a diagnosis, for people. Knows nothing of torch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "monitor/Blame.hpp"

namespace torchcomms_pg {

struct Verdict {
  std::vector<int> ranks;  // ranks that hold up the operation, see Blame
  std::string summary;     // what holds it up, for an error's first line; empty: it is not known
  std::string text;
  int64_t extensionMs =
      0;             // positive: nobody has failed; wait that much longer, for what `text` says
  int answered = 0;  // number of ranks that did
  // Known to the rank that judges alone.
  bool arrived = false;      // all ranks have come
  std::vector<int> missing;  // ranks that have not come to the operation asked about

  static void fields(auto& self, auto& visit) {
    visit(self.ranks, self.summary, self.extensionMs, self.answered, self.text);
  }
};

// Finds the verdict. `silent`: the ranks without an answer.
Verdict judge(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, Silent>& silent);

std::string encode(const Verdict& verdict);
// Decodes a text. None: `text` is damaged, or another version's.
std::optional<Verdict> decodeVerdict(const std::string& text);

}  // namespace torchcomms_pg
