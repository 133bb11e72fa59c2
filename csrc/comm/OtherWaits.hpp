// Waits of this process for other ranks that are no operations of a group: for example in
// new_group, or in another library's queue.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "monitor/RankStatus.hpp"
#include "operation/Operation.hpp"
#include "status/ProcessStatus.hpp"

namespace torchcomms_pg::other_waits {

struct OtherWait {
  std::string text;            // equal on all ranks that meet
  std::vector<int64_t> ranks;  // global ranks that are waited for
  bool meets = false;          // true if each of `ranks` has to come to the same wait
  std::string calledAt;        // line of Python
  // Time after which the process prints which ranks are missing; 0 for never.
  Milliseconds verdictAfter{0};
};

// Records that a thread of this process begins to wait. Returns the number for end(). Raises
// std::runtime_error if the monitor cannot be started.
uint64_t begin(OtherWait wait);
void end(uint64_t number);

// Returns the waits for a rank's answer in a diagnosis: they explain why the rank does not come,
// and hold no needs that the rule of blame could follow.
std::vector<Wait> ofDiagnosis();
// Returns the waits for the process's status.
std::vector<status::OtherWait> ofStatus();

}  // namespace torchcomms_pg::other_waits
