// Calls of users' hooks in threads in which no caller can get the hooks' exceptions.
#pragma once

#include <exception>
#include <string>

#include "monitor/Printer.hpp"

namespace torchcomms_pg {

// Calls a hook, and prints what it raises. `what`: e.g. "an end hook".
template <class Call>
void callHook(const char* what, const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    printLine(std::string("torchcomms_pg: ") + what + " raised: " + error.what());
  }
}

}  // namespace torchcomms_pg
