// Where the Python threads of this process are, asked by a thread that must
// not wait for the GIL. Knows nothing of Python; the bindings do.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace torchcomms_pg {

// One question, and its answer once it is there.
class PythonStackDump {
 public:
  struct Told {
    std::string threads;   // one line for each thread
    std::string calledAt;  // what the stack says; empty where there is none
  };

  struct Source {
    // Takes the GIL. `stack` as StackSource::capture() gave it; null: none.
    std::function<Told(const std::shared_ptr<const void>& stack)> ask;
    // What can be told while another thread keeps the GIL; may be empty.
    std::function<std::string()> askWithoutGil;
  };

  // Set once, when the module is loaded, and never freed.
  static void setSource(Source source);

  // Begins to ask, in a thread of its own.
  explicit PythonStackDump(std::shared_ptr<const void> stack);

  bool answered() const;
  // Whether tell() has all it can have: after a second it has waited enough.
  bool ready() const;
  // What is known now.
  Told tell() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread, which may wait for the GIL for long
  std::chrono::steady_clock::time_point until_;
};

}  // namespace torchcomms_pg
