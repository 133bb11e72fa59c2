// Text from other processes and callers, made safe for a terminal and a log.
#pragma once

#include <string>

namespace torchcomms_pg {

// Returns the text with each control character, except line ends, as a hexadecimal escape: \x1b.
// Bytes above 0x7f are taken for UTF-8, in which U+0080 to U+009F are escaped, too, since terminals
// may obey them.
std::string printable(const std::string& text);

}  // namespace torchcomms_pg
