// The status of a job in the formats of NCCL's RAS (NCCL 2.30, src/ras/client_support.cc), as far
// as programs read them. docs/status.md describes what each part shows.
#pragma once

#include <string>

#include "diagnosis/status/Job.hpp"

namespace torchcomms_pg::status {

// Returns the report for people. If `verbose`, lists and verdicts are not shortened.
std::string rasText(const Job& job, bool verbose);

// Returns one line of JSON, with NCCL's fields and some additional ones.
std::string rasJson(const Job& job);

// Returns this host's time, in RAS's format.
std::string rasTime();

}  // namespace torchcomms_pg::status
