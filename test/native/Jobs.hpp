// Jobs that are made up: what their ranks tell.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "Check.hpp"
#include "diagnosis/status/Job.hpp"

namespace torchcomms_pg::status {

inline constexpr uint64_t kId = 99;
inline constexpr uint64_t kKey = 7;

// A rank of a group of `size` that has issued `collectives`, and waits in the last of them.
inline ProcessStatus rankOf(int rank, int size, uint64_t collectives, bool waits) {
  ProcessStatus process;
  process.pid = static_cast<uint32_t>(1000 + rank);
  process.host = "host" + std::to_string(rank / 8);
  process.version = "1.2.3";
  process.threads = "MainThread: train.py:8 in load";
  MemberStatus group;
  group.id = kId;
  group.key = kKey;
  group.name = "world";
  group.rank = rank;
  group.ranks.resize(size);
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  group.collectives = collectives - (waits ? 1 : 0);
  group.launched = {0, 0, 0, 0, collectives, 0, 0, 0, 0, 0};
  group.lastCompleted.text = "all_reduce #" + std::to_string(group.collectives) + " (8 x Float)";
  if (waits) {
    OpInFlight op;
    op.text = "all_reduce #" + std::to_string(collectives) + " (8 x Float)";
    op.seq = collectives;
    op.signature = "all_reduce Float";
    op.ageMs = 20'000;
    op.timeoutMs = 60'000;
    op.waits = true;
    op.stand = Stand::inCall;
    op.calledAt = "train.py:18 in main";
    op.wait.text = op.text;
    op.wait.group = kKey;
    op.wait.members = runsOf(group.ranks);
    op.wait.collectives = {{collectives, -1}};
    group.inFlight = 1;
    group.ops.push_back(std::move(op));
  }
  RankActivity activity;
  activity.rank = rank;
  activity.groups.push_back(std::move(group));
  activity.counts = {{kKey, collectives, 0, {}}};
  process.ranks.push_back(std::move(activity));
  return process;
}

// Passes the hosts' answers through their text, as the store does.
inline std::vector<HostStatus> hostsOf(const std::vector<ProcessStatus>& processes) {
  std::vector<HostStatus> hosts;
  for (size_t first = 0; first < processes.size(); first += 8) {
    HostStatus host;
    host.host = processes[first].host;
    for (size_t i = first; i < std::min(first + 8, processes.size()); ++i) {
      host.processes.push_back(processes[i]);
    }
    const auto decoded = decodeHost(encode(host));
    CHECK(decoded.has_value());
    hosts.push_back(*decoded);
  }
  return hosts;
}

inline JobQuestion question() {
  return {1000, "host0", 10'000, 100};
}

}  // namespace torchcomms_pg::status
