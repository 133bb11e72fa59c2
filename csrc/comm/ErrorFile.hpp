// The file from which torchrun takes the error of a rank that has ended.
#pragma once

#include <string>

namespace torchcomms_pg::error_file {

// Sets the file's path; "" for none.
void set(const std::string& path);

// Writes `text` to the file, in torchelastic's format, in place of an earlier text. Does nothing
// without a path. Prints an error instead of raising it.
void write(const std::string& text) noexcept;

}  // namespace torchcomms_pg::error_file
