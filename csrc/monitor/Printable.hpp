// Text of other processes and of callers, made fit for a terminal and for one line of a log each.
#pragma once

#include <string>

namespace torchcomms_pg {

// Returns the text with control characters, except the end of a line, written as in C: "\\x1b".
// Bytes beyond ASCII are taken for UTF-8, whose control characters (U+0080 to U+009F) terminals may
// obey, too.
std::string printable(const std::string& text);

}  // namespace torchcomms_pg
