#include "status/ProcessStatus.hpp"

#include <algorithm>

#include "monitor/Fields.hpp"

namespace torchcomms_pg::status {

namespace {

// Limit of the number of ranks of a group, in case a text is damaged.
constexpr uint64_t kMostRanks = 1 << 20;

std::vector<Run> runsOf(const std::vector<int64_t>& ranks) {
  std::vector<Run> runs;
  for (const auto rank : ranks) {
    auto* const last = runs.empty() ? nullptr : &runs.back();
    if (last != nullptr && last->count == 1) {
      last->step = rank - last->first;
      last->count = 2;
    } else if (
        last != nullptr && rank == last->first + last->step * static_cast<int64_t>(last->count)) {
      ++last->count;
    } else {
      runs.push_back({rank, 0, 1});
    }
  }
  return runs;
}

// Appends the ranks of the runs to `ranks`. Returns false if they are more than kMostRanks.
bool spread(const std::vector<Run>& runs, std::vector<int64_t>& ranks) {
  for (const auto& run : runs) {
    if (run.count > kMostRanks || ranks.size() + run.count > kMostRanks) {
      return false;
    }
    for (uint64_t i = 0; i < run.count; ++i) {
      ranks.push_back(run.first + run.step * static_cast<int64_t>(i));
    }
  }
  return true;
}

void pack(ProcessStatus& status) {
  for (auto& rank : status.ranks) {
    for (auto& group : rank.groups) {
      group.runs = runsOf(group.ranks);
      for (auto& op : group.ops) {
        op.wait.members.clear();
      }
    }
  }
}

bool unpack(ProcessStatus& status) {
  for (auto& rank : status.ranks) {
    for (auto& group : rank.groups) {
      if (!spread(group.runs, group.ranks) || group.rank < 0 ||
          static_cast<size_t>(group.rank) >= group.ranks.size()) {
        return false;
      }
      for (auto& op : group.ops) {
        op.wait.members = group.ranks;
      }
    }
  }
  return true;
}

}  // namespace

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
  return status && std::ranges::all_of(status->processes, unpack) ? std::move(status)
                                                                  : std::nullopt;
}

}  // namespace torchcomms_pg::status
