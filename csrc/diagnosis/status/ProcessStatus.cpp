#include "diagnosis/status/ProcessStatus.hpp"

#include <algorithm>

#include "diagnosis/rank/Fields.hpp"

namespace torchcomms_pg::status {

namespace {

void pack(ProcessStatus& status) {
  for (auto& group : groupsOf(status)) {
    group.runs = runsOf(group.ranks);
    for (auto& op : group.ops) {
      op.wait.members.clear();
    }
  }
}

bool unpack(ProcessStatus& status) {
  for (auto& group : groupsOf(status)) {
    if (!spread(group.runs, group.ranks) || group.rank < 0 ||
        static_cast<size_t>(group.rank) >= group.ranks.size()) {
      return false;
    }
    for (auto& op : group.ops) {
      op.wait.members = group.runs;
    }
  }
  return true;
}

bool unpackAll(HostStatus& status) {
  return std::ranges::all_of(status.processes, unpack);
}

}  // namespace

void setCurrent(RankStatus& status, const OpInFlight& op) {
  status.current = op.text;
  status.stand = op.stand;
  status.currentSeq = op.signature.empty() ? 0 : op.seq;
  status.signature = op.signature;
  status.waitedMs = op.ageMs;
  status.calledAt = op.calledAt;
}

std::string encode(ProcessStatus status) {
  pack(status);
  return fields::write(status);
}

std::optional<ProcessStatus> decodeProcess(const std::string& text) {
  auto status = fields::read<ProcessStatus>(text);
  return status && unpack(*status) ? std::move(status) : std::nullopt;
}

std::string encode(HostStatus status) {
  std::ranges::for_each(status.processes, pack);
  return fields::write(status);
}

std::optional<HostStatus> decodeHost(const std::string& text) {
  auto status = fields::read<HostStatus>(text);
  return status && unpackAll(*status) ? std::move(status) : std::nullopt;
}

std::string encode(JobAnswers answers) {
  for (auto& host : answers.hosts) {
    std::ranges::for_each(host.processes, pack);
  }
  return fields::write(answers);
}

std::optional<JobAnswers> decodeAnswers(const std::string& text) {
  auto answers = fields::read<JobAnswers>(text);
  return answers && std::ranges::all_of(answers->hosts, unpackAll) ? std::move(answers)
                                                                   : std::nullopt;
}

}  // namespace torchcomms_pg::status
