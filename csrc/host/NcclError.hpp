// The error that a library throws, reports and records, and the text by which other ranks get it.
// NCCL's functions return it as a result code and a "last error" text.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torchcomms_pg::host {

class NcclError : public std::runtime_error {
 public:
  // `ranks` are the ranks at fault, if known: they died, left, aborted or did not arrive.
  NcclError(ncclResult_t result, const std::string& text, std::vector<int> ranks = {})
      : std::runtime_error(text), result(result), ranks(std::move(ranks)) {}
  const ncclResult_t result;
  const std::vector<int> ranks;
};

// Returns the number of bytes of `text`, which is UTF-8, that fit into `room` bytes without a part
// of a character.
size_t wholeCharacters(std::string_view text, size_t room);

// Turns an error into a text of at most `room` bytes, such as "6 0-2 5\nreason": the result, the
// ranks at fault in ascending order, and the reason, which is UTF-8 and cut between characters.
// Leaves out the ranks if they need more than half of the room: the reason matters more.
std::string encode(const NcclError& error, size_t room = SIZE_MAX);
// Turns a text of encode() into an error. Returns nullopt if `text` has another format.
std::optional<NcclError> decode(const std::string& text);

}  // namespace torchcomms_pg::host
