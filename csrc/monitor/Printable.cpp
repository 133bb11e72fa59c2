#include "monitor/Printable.hpp"

#include <cstdio>

namespace torchcomms_pg {

std::string printable(const std::string& text) {
  std::string shown;
  shown.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto letter = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    const bool wide = letter == 0xc2 && next >= 0x80 && next <= 0x9f;
    if (wide || (letter < 0x20 && letter != '\n') || letter == 0x7f) {
      char escaped[5];
      std::snprintf(escaped, sizeof(escaped), "\\x%02x", wide ? next : letter);
      shown += escaped;
      i += wide ? 1 : 0;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

}  // namespace torchcomms_pg
