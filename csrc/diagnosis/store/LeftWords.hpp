// What ranks leave in the job's store when they end a group, for ranks that then fail in it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>
#include <string>
#include <vector>

#include "comm/InFlightOps.hpp"
#include "operation/Group.hpp"

namespace torchcomms_pg::left_words {

// Leaves the word of `rank`: `how` it ends the group, and the group's last operation that has
// completed. Waits for the store for at most 300 ms, and raises no error. The last of the group's
// `size` ranks to leave erases all words.
void leave(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& how,
    const InFlightOps& inFlight) noexcept;

// The word of one rank.
struct Word {
  int rank;
  std::string text;  // as from tell()
};
// Returns the word of the first rank that has left, or nullopt if no rank has. Raises the store's
// errors.
std::optional<Word> first(const c10::intrusive_ptr<c10d::Store>& store, const Group& group);

// Returns whether a rank has left word. Raises the store's errors.
bool has(const c10::intrusive_ptr<c10d::Store>& store, int rank);

// Returns the words that `ranks` have left, as "; rank 1 ...", in the order of time. Waits for the
// store for at most 500 ms, and raises no error.
std::string tell(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const Group& group) noexcept;

}  // namespace torchcomms_pg::left_words
