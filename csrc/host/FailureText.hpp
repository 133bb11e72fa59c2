// Failures as texts for other ranks, which have room for so many bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "host/NcclError.hpp"

namespace torchcomms_pg::host {

// Returns the beginning of `text`, UTF-8, that ends with a whole letter and has room.
std::string cut(const std::string& text, size_t room);

// Turn a failure into a text, "1 2 \nreason", and back. A list of ranks that would take more than
// half of the room is left out: the reason tells more. None: it is not such a text.
std::string encode(const NcclError& failure, size_t room = SIZE_MAX);
std::optional<NcclError> decode(const std::string& text);

}  // namespace torchcomms_pg::host
