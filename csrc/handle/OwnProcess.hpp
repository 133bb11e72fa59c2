// The process that made an object of a group. A forked child has a copy of that process's memory
// but none of its threads, which may have held any lock at the fork. Functions that take a lock
// therefore check the process first.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "host/Process.hpp"

namespace torchcomms_pg {

class OwnProcess {
 public:
  bool isThis() const { return pid_ == host::processId(); }

  // Raises if another process has made the object.
  void check(const std::string& group) const {
    TORCH_CHECK(
        isThis(), "group '", group,
        "' was created before this process was forked and cannot be used here; create groups in "
        "the child");
  }

 private:
  const uint32_t pid_ = host::processId();
};

}  // namespace torchcomms_pg
