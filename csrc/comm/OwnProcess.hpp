// The process that made an object of a group. One that is forked from it has its memory and none of
// its threads, which may have held any lock at the fork: what takes a lock asks here first.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

#include "host/Process.hpp"

namespace torchcomms_pg {

class OwnProcess {
 public:
  bool isThis() const { return pid_ == host::processId(); }

  // Raises where it is not this process.
  void check(const std::string& group) const {
    TORCH_CHECK(
        isThis(),
        "group '",
        group,
        "' was created before this process was forked and cannot be used here; create groups in "
        "the child");
  }

 private:
  const uint32_t pid_ = host::processId();
};

}  // namespace torchcomms_pg
