// The file from which torchrun takes the error of a rank that has ended.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torchcomms_pg::error_file {

// Sets the file's path; "" for none.
void set(const std::string& path);

// Writes `text` to the file, in torchelastic's format, in place of an earlier text. Does nothing
// without a path. Prints an error instead of raising it. `ranks`: the ranks that `text` blames, by
// their numbers in the default group.
void write(const std::string& text, const std::vector<int64_t>& ranks) noexcept;

// Removes the file if it still has `text` from write(): what the text says does not hold any more.
void withdraw(const std::string& text) noexcept;

}  // namespace torchcomms_pg::error_file
