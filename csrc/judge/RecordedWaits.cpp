#include "judge/RecordedWaits.hpp"

#include <cstdint>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "diagnosis/hang/Blame.hpp"
#include "diagnosis/rank/Fields.hpp"
#include "diagnosis/status/Json.hpp"

namespace torchcomms_pg {

namespace {

struct RankRecord {
  int rank = 0;
  std::vector<Wait> waits;
  std::vector<GroupCounts> counts;

  static void fields(auto& self, auto& visit) { visit(self.rank, self.waits, self.counts); }
};

struct JobRecord {
  int size = 0;
  std::vector<RankRecord> ranks;

  static void fields(auto& self, auto& visit) { visit(self.size, self.ranks); }
};

std::string written(const Blame& blame) {
  std::vector<int> circle;
  for (const auto& link : blame.circle) {
    circle.push_back(std::atoi(link.wait.text.c_str()));
  }
  status::Json json;
  json.object([&] {
    json.field("late", blame.lateRanks());
    json.field("silent", blame.silent);
    json.field("missing", blame.missing);
    json.field("circle", circle);
  });
  return json.take();
}

}  // namespace

std::optional<std::string> blameRecorded(const std::string& records) {
  const auto job = fields::read<JobRecord>(records);
  if (!job) {
    return std::nullopt;
  }
  Answers answers;
  for (const auto& record : job->ranks) {
    if (record.rank < 0 || record.rank >= job->size) {
      return std::nullopt;
    }
    auto& answer = answers[record.rank];
    answer.rank = record.rank;
    answer.waits = record.waits;
    answer.counts = record.counts;
  }
  SilentRanks silent;
  for (int rank = 0; rank < job->size; ++rank) {
    if (!answers.contains(rank)) {
      silent[rank];
    }
  }
  // All ranks of a collective wait for the same ranks.
  std::map<std::pair<uint64_t, uint64_t>, std::string> ofCollective;
  std::string all = "[";
  for (const auto& record : job->ranks) {
    for (const auto& wait : record.waits) {
      auto own = std::string();
      auto& text = wait.group == 0 || wait.collectives.empty()
                       ? own
                       : ofCollective[{wait.group, wait.collectives.back().seq}];
      if (text.empty()) {
        DiagnosisRequest request;
        request.rank = record.rank;
        request.size = job->size;
        request.wait = wait;
        text = written(blame(request, answers, silent));
      }
      all += (all.size() > 1 ? "," : "") + text;
    }
  }
  return all + "]";
}

}  // namespace torchcomms_pg
