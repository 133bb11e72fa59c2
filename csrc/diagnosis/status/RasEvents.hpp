// Events of a job's processes, for clients that monitor the job with NCCL's RAS.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "diagnosis/status/Job.hpp"
#include "diagnosis/status/RasDialogue.hpp"

namespace torchcomms_pg::status {

// A process of the job, as one look at the job found it.
struct RasPeer {
  std::string host;
  uint32_t pid = 0;
  std::string state;  // "answers", or SilentProcess::state
  std::string text;   // what is known of the process if it does not answer
};
std::vector<RasPeer> peersOf(const Job& job);

struct RasEvent {
  RasEvents group = RasEvents::lifecycle;
  const char* name = "";  // NCCL's name of the event
  RasPeer peer;
};

// Returns the event as one line, with its newline.
std::string textOf(const RasEvent& event, bool json);

// The processes of the job, as the last look found them.
class RasPeers {
 public:
  // Returns the events since the last call, or none at the first call. A process that is no longer
  // among `peers` causes no event: it has ended normally, or its host has not answered.
  std::vector<RasEvent> notice(const std::vector<RasPeer>& peers);

 private:
  std::map<std::pair<std::string, uint32_t>, std::string> states_;  // by host and pid
  bool looked_ = false;
};

}  // namespace torchcomms_pg::status
