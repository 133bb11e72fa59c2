// The status of a job as JSON.
#pragma once

#include <string>

#include "diagnosis/status/Job.hpp"

namespace torchcomms_pg::status {

// Returns the job's status in the form that docs/status.md describes.
std::string report(const JobAnswers& answers);

}  // namespace torchcomms_pg::status
