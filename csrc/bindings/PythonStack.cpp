// Python's stacks, for the flight recorder.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/PerProcess.hpp"
#include "base/TextStreams.hpp"
#include "bindings/Bindings.hpp"
#include "bindings/Frames.hpp"
#include "diagnosis/rank/PythonStackDump.hpp"
#include "recorder/Stack.hpp"

namespace torchcomms_pg {

namespace {

// Number of innermost frames that are kept. More would slow every operation.
constexpr size_t kMaxFrames = 64;

struct Call {
  PyCodeObject* code = nullptr;  // owned
  int instruction = 0;
  bool operator==(const Call&) const = default;
};

using Calls = std::vector<Call>;

void letGoOf(const Calls& calls) {
  for (const auto& call : calls) {
    Py_DECREF(call.code);
  }
}

// Stacks dropped by threads that must not wait for the GIL. The next thread that captures a stack
// releases their references.
struct Dropped {
  Mutex mutex;
  std::vector<Calls> stacks GUARDED_BY(mutex);
};
PerProcess<Dropped> dropped;
// True if the list has entries. Threads skip an empty list, since get() makes a system call.
std::atomic<bool> anyDropped{false};

struct Captured {
  Calls calls;
  explicit Captured(Calls calls) : calls(std::move(calls)) {}
  ~Captured() {
    auto& list = dropped.get();
    LockGuard lock(list.mutex);
    list.stacks.push_back(std::move(calls));
    anyDropped.store(true, std::memory_order_relaxed);
  }
};

void letGoOfDropped() {
  if (!anyDropped.load(std::memory_order_relaxed)) {
    return;
  }
  static thread_local std::vector<Calls> spare;
  auto stacks = std::exchange(spare, {});  // freeing a code object may run code that reenters
  {
    auto& list = dropped.get();
    LockGuard lock(list.mutex);
    stacks.swap(list.stacks);
    anyDropped.store(false, std::memory_order_relaxed);
  }
  for (const auto& stack : stacks) {
    letGoOf(stack);
  }
  stacks.clear();
  spare = std::move(stacks);
}

// Adds the frames of a thread, as owned references. Needs the GIL.
void addFrames(Calls& calls, PyThreadState* thread) {
  walk(PyThreadState_GetFrame(thread), [&](PyFrameObject* frame) {
    calls.push_back({PyFrame_GetCode(frame), instructionOf(frame)});
    return calls.size() < kMaxFrames;
  });
}

std::string text(PyObject* string) {
  Py_ssize_t size = 0;
  const char* const utf8 = PyUnicode_AsUTF8AndSize(string, &size);
  if (utf8 == nullptr) {
    PyErr_Clear();  // a file's name need not be valid Unicode
    return "?";
  }
  return {utf8, static_cast<size_t>(size)};
}

// The code objects of functions that wait for the operations they issue, see
// StackSource::waits(). Their references are owned. The list is set once.
auto& waiting = neverDestroyed<std::vector<PyCodeObject*>>();

const Calls& callsOf(const Stack& stack) {
  return std::static_pointer_cast<const Captured>(stack)->calls;
}

// Returns whether `all` is the stack `outer` with further calls inside its innermost call.
bool isDeeper(const Calls& all, const Calls& outer) {
  return all.size() > outer.size() && std::equal(outer.rbegin(), outer.rend(), all.rbegin());
}

// The latest stacks of a thread. Operations that were issued from one place, such as the sends of a
// loop, share a stack: a new stack costs allocations and a system call.
class Latest {
 public:
  // Returns the stack of these calls. Takes over their references.
  std::shared_ptr<const Captured> of(const Calls& calls) {
    const auto known = std::ranges::find_if(
        stacks_, [&](const auto& stack) { return stack != nullptr && stack->calls == calls; });
    if (known != stacks_.end()) {
      const auto stack = *known;
      letGoOf(calls);
      return stack;
    }
    auto stack = std::make_shared<const Captured>(calls);
    stacks_[next_++ % stacks_.size()] = stack;
    return stack;
  }

 private:
  std::array<std::shared_ptr<const Captured>, 8> stacks_;
  size_t next_ = 0;
};

class PythonStacks final : public StackSource {
 public:
  Stack capture() override {
    // A thread without a Python thread state has no Python stack.
    if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
      return nullptr;
    }
    static thread_local Latest latest;
    static thread_local Calls spare;
    py::gil_scoped_acquire gil;
    letGoOfDropped();
    auto calls = std::exchange(spare, {});  // code that the garbage collector runs may reenter
    addFrames(calls, PyThreadState_Get());
    auto stack = latest.of(calls);
    calls.clear();
    spare = std::move(calls);
    return stack;
  }

  std::vector<std::string> threads() override {
    std::vector<std::string> lines;
    const PythonStackDump asked({});
    while (!asked.ready()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    TextReader text(asked.answered() ? asked.tell().threads : "");
    for (std::string line; std::getline(text, line);) {
      lines.push_back(std::move(line));
    }
    return lines;
  }

  std::vector<std::vector<Frame>> describe(const std::vector<Stack>& stacks) override {
    std::vector<std::vector<Frame>> described(stacks.size());
    if (Py_IsInitialized() == 0) {
      return described;
    }
    py::gil_scoped_acquire gil;
    for (size_t i = 0; i < stacks.size(); ++i) {
      if (stacks[i] == nullptr) {
        continue;
      }
      for (const auto& call : callsOf(stacks[i])) {
        described[i].push_back(
            {text(call.code->co_name), text(call.code->co_filename),
             PyCode_Addr2Line(call.code, call.instruction), call.instruction,
             call.code->co_firstlineno});
      }
    }
    return described;
  }

  bool waits(const Stack& stack) override {
    return stack != nullptr && std::ranges::any_of(callsOf(stack), [&](const Call& call) {
             return std::ranges::find(waiting, call.code) != waiting.end();
           });
  }

  bool within(const Stack& inner, const Stack& outer) override {
    if (inner == nullptr || outer == nullptr || callsOf(inner).size() == kMaxFrames) {
      return true;  // unknown
    }
    return isDeeper(callsOf(inner), callsOf(outer));
  }

  bool stands(uint64_t thread, const Stack& stack) override {
    if (stack == nullptr || Py_IsInitialized() == 0) {
      return true;  // unknown
    }
    py::gil_scoped_acquire gil;
    const WithoutCollector guard;
    auto* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    while (state != nullptr && state->thread_id != thread) {
      state = PyThreadState_Next(state);
    }
    if (state == nullptr) {
      return false;
    }
    Calls calls;
    addFrames(calls, state);
    const auto& known = callsOf(stack);
    const bool there = calls == known || isDeeper(calls, known);
    letGoOf(calls);
    return there;
  }
};

}  // namespace

py::list callsOfStack(const Stack& stack) {
  py::list calls;
  if (stack != nullptr) {
    for (const auto& call : callsOf(stack)) {
      calls.append(
          py::make_tuple(
              py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(call.code)),
              call.instruction));
    }
  }
  return calls;
}

void usePythonStacks(py::module_& module) {
  StackSource::set(&neverDestroyed<PythonStacks>());
  module.def(
      "set_waiting_functions",
      [](const std::vector<py::function>& functions) {
        if (waiting.empty()) {
          for (const auto& function : functions) {
            py::object code = function.attr("__code__");
            waiting.push_back(reinterpret_cast<PyCodeObject*>(code.release().ptr()));
          }
        }
      },
      py::arg("functions"));
}

}  // namespace torchcomms_pg
