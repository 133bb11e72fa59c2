// What happens to the processes of a job, for those who watch it by NCCL's RAS.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "status/Job.hpp"
#include "status/RasDialogue.hpp"

namespace torchcomms_pg::status {

// A process at one look at the job.
struct RasPeer {
  std::string host;
  uint32_t pid = 0;
  std::string state;  // "answers", or see SilentProcess
  std::string text;   // what is known of one that does not answer
};
std::vector<RasPeer> peersOf(const Job& job);

struct RasEvent {
  RasEvents group = RasEvents::lifecycle;
  const char* name = "";  // NCCL's
  RasPeer peer;
};

// Writes an event, which ends in a new line.
std::string textOf(const RasEvent& event, bool json);

// The processes of the job as last seen.
class RasPeers {
 public:
  // Returns what has happened since the look before; of the first one nothing. A process that is
  // not seen any more has ended in order, or its host has not answered: nothing is said of it.
  std::vector<RasEvent> notice(const std::vector<RasPeer>& peers);

 private:
  std::map<std::pair<std::string, uint32_t>, std::string> states_;  // by host and pid
  bool looked_ = false;
};

}  // namespace torchcomms_pg::status
