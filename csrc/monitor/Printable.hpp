// Text of other processes and of callers, made fit for a terminal and for one line of a log each.
#pragma once

#include <string>

namespace torchcomms_pg {

// With control characters, but the end of a line, as C writes them: "\\x1b". What stands beyond
// ASCII is taken for UTF-8, whose control characters (U+0080 to U+009F) terminals may obey, too.
std::string printable(const std::string& text);

}  // namespace torchcomms_pg
