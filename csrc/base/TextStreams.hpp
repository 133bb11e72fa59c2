// Text streams that format numbers the same way under every locale.
#pragma once

#include <locale>
#include <sstream>
#include <string>

namespace torchcomms_pg {

// Writes "1024". Other streams may write "1,024" after a program has set std::locale::global().
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
