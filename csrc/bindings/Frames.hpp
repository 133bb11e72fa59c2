// Frames of Python's threads.
#pragma once

#include "bindings/Bindings.hpp"

namespace torchcomms_pg {

// Keeps the garbage collector from running while frames of other threads are read. Both need the
// GIL meanwhile. Python 3.11 may start the collector wherever it allocates, and the collector may
// run code that lets go of the GIL. A function of Python's that makes an object for a frame, or
// reads its variables, then goes on with memory that the frame's thread has left.
class WithoutCollector {
 public:
  WithoutCollector() : collects_(PyGC_Disable() != 0) {}
  ~WithoutCollector() {
    if (collects_) {
      PyGC_Enable();
    }
  }
  WithoutCollector(const WithoutCollector&) = delete;
  WithoutCollector& operator=(const WithoutCollector&) = delete;

 private:
  const bool collects_;
};

inline int instructionOf(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti * static_cast<int>(sizeof(_Py_CODEUNIT));
#endif
}

// Calls `visit` with each frame from `innermost` outwards, until it returns false. Takes over the
// reference to `innermost`, which may be null.
template <class Visit>
void walk(PyFrameObject* innermost, Visit visit) {
  auto* frame = innermost;
  while (frame != nullptr && visit(frame)) {
    auto* const caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
}

}  // namespace torchcomms_pg
