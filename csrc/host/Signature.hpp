// The signature of a collective, which peers compare, and its text in errors.
#pragma once

#include <string>

#include "nccl/Collective.hpp"

namespace torchcomms_pg::host {

bool hasRoot(CollectiveKind kind);

Signature signatureOf(const Collective& collective);

// Returns a text such as "all_reduce(count=4, float32, sum)".
std::string describe(const Signature& signature);

}  // namespace torchcomms_pg::host
