// Who holds up the operations of flight recorders' dumps.
#pragma once

#include <optional>
#include <string>

namespace torchcomms_pg {

// Applies the rule of blame (diagnosis/hang/Blame.hpp) to each wait of each rank of a job.
//
// `records`: the number of ranks, and of each rank with a dump its number, its waits and its counts
// of operations, as diagnosis/rank/Fields.hpp writes them. A rank has one number in all groups,
// below the number of ranks. A wait's text is its number among all waits.
//
// Returns JSON: a list with an object for each wait, in the order of the records. `late`: the ranks
// that hold it up. `silent`: ranks without a dump that may. `missing`: the ranks that have not
// arrived at it. `circle`: the numbers of waits of ranks that wait for each other. Returns nullopt
// if `records` is damaged.
std::optional<std::string> blameRecorded(const std::string& records);

}  // namespace torchcomms_pg
