// The status of a job in the formats of NCCL's RAS (NCCL 2.30, src/ras/client_support.cc): what of
// them programs read. See docs/ras.md for what stands for what.
#pragma once

#include <string>

#include "status/Job.hpp"

namespace torchcomms_pg::status {

// Writes the report for people. `verbose`: with all ranks of a long list, and all of a verdict.
std::string rasText(const Job& job, bool verbose);

// Writes one line of JSON with NCCL's fields, and some beside them.
std::string rasJson(const Job& job);

// Returns the time of this host, as RAS writes it.
std::string rasTime();

}  // namespace torchcomms_pg::status
