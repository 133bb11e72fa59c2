// Text from other processes and callers, made safe for a terminal and a log.
#pragma once

#include <string>

namespace torchcomms_pg {

// Returns the text with control characters, except line ends, written as in C: "\\x1b". Other bytes
// are taken for UTF-8, whose control characters (U+0080 to U+009F) terminals may also obey.
std::string printable(const std::string& text);

}  // namespace torchcomms_pg
