// Streams of text in which numbers look alike, whatever the locale is.
#pragma once

#include <locale>
#include <sstream>
#include <string>

namespace torchcomms_pg {

// After a program's std::locale::global(std::locale("")), other streams group digits: "1,024".
class TextWriter : public std::ostringstream {
 public:
  TextWriter() { imbue(std::locale::classic()); }
};

class TextReader : public std::istringstream {
 public:
  explicit TextReader(const std::string& text) : std::istringstream(text) {
    imbue(std::locale::classic());
  }
};

}  // namespace torchcomms_pg
