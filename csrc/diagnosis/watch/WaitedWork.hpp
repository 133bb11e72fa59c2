// The Works of other backends for which threads of Python wait. A backend does not tell whether a
// thread is in Work.wait(), so the bindings put WaitedWork around that function.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "diagnosis/group/GroupActivity.hpp"

namespace torchcomms_pg {

// While it exists, the calling thread counts as waiting for the Work.
class WaitedWork {
 public:
  explicit WaitedWork(const c10d::Work* work);
  ~WaitedWork();
  WaitedWork(const WaitedWork&) = delete;
  WaitedWork& operator=(const WaitedWork&) = delete;

  // Returns a thread that waits for the Work, and since when.
  static GroupActivity::Waiter waiterFor(const c10d::Work* work);

 private:
  const c10d::Work* const work_;
};

}  // namespace torchcomms_pg
