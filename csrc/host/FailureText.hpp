// Failures as texts for other ranks, cut to a number of bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "host/NcclError.hpp"

namespace torchcomms_pg::host {

// Returns the longest beginning of `text` (UTF-8) that fits into `room` bytes and ends with a whole
// character.
std::string cut(const std::string& text, size_t room);

// Turns a failure into a text, "1 2 \nreason". Leaves out a list of ranks that would take more than
// half of the room, since the reason matters more.
std::string encode(const NcclError& failure, size_t room = SIZE_MAX);
// Turns such a text into a failure. Returns nullopt if `text` has another format.
std::optional<NcclError> decode(const std::string& text);

}  // namespace torchcomms_pg::host
