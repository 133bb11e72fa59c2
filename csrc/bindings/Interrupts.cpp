// Runs Python's signal handlers while a thread waits in C++, where Python runs them only on
// request.
#include <unistd.h>

#include "bindings/Bindings.hpp"
#include "comm/OpenCall.hpp"
#include "host/Interrupt.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg {

namespace {

// The exception that a handler has raised in this thread, until take(); null if none has.
thread_local std::exception_ptr raised;

// Returns whether handlers can run in this thread: Python runs them in the main thread only.
bool here() noexcept {
  return static_cast<uint32_t>(gettid()) == host::processId() && Py_IsInitialized() != 0;
}

bool pending() noexcept {
  if (raised) {
    return true;
  }
  if (!here()) {
    return false;
  }
  try {
    const py::gil_scoped_acquire gil;
    const auto handling = OpenCall::handling();
    if (PyErr_CheckSignals() != 0) {
      raised = std::make_exception_ptr(py::error_already_set());
    }
  } catch (const std::exception&) {
    // No memory to keep the handler's exception, which is lost. The next signal runs the handler.
  }
  return raised != nullptr;
}

std::exception_ptr take() noexcept {
  return std::exchange(raised, nullptr);
}

constexpr host::InterruptSource kSource{here, pending, take};

}  // namespace

void bindInterrupts() {
  host::interruptSource.store(&kSource, std::memory_order_release);
}

}  // namespace torchcomms_pg
