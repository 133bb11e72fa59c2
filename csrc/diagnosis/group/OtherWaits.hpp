// Waits of this process for other ranks that are no operations of a group: for example in
// new_group, or in another library's queue.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diagnosis/rank/RankStatus.hpp"
#include "diagnosis/status/ProcessStatus.hpp"
#include "diagnosis/store/Meeting.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg::other_waits {

// `ageMs` and `meeting` are known when the status asks for them.
struct OtherWait : status::OtherWait {
  // Time after which the process prints which ranks are missing; 0 for never.
  Milliseconds verdictAfter{0};
  // Set if this rank, `self`, is in no group in which it could ask the others.
  std::optional<MeetingPlace> place = std::nullopt;
};

// Records that a thread of this process begins to wait. Returns the number for end().
uint64_t begin(OtherWait wait);
// `joined`: this rank has joined the others of its meeting, and stays on the meeting's list.
void end(uint64_t number, bool joined);

// Returns what this process says of its longest wait when SIGTERM ends it: "init_process_group of 3
// ranks had waited 14.03 s, ...". Only waits for ranks that have to come to the same wait count, if
// they began before `at`. Returns "" if no such wait exists. Blocks for at most half a second.
std::string lastWords(Clock::time_point at);

// Returns the waits for a rank's answer in a diagnosis: they explain why the rank does not arrive.
// They have no needs that the rule of blame could follow.
std::vector<Wait> ofDiagnosis();
// Returns the waits for the process's status.
std::vector<status::OtherWait> ofStatus();

}  // namespace torchcomms_pg::other_waits
