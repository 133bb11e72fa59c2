// Stacks of the Python threads of this process, for a thread that must not wait for the GIL. Knows
// nothing of Python; the bindings do.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace torchcomms_pg {

// One request for the stacks, and the answer once it is there.
class PythonStackDump {
 public:
  struct Told {
    std::string threads;   // one line for each thread
    std::string calledAt;  // place that the stack tells; empty where there is none
  };

  struct Source {
    // Takes the GIL. `stack`: from StackSource::capture(); null: none.
    std::function<Told(const std::shared_ptr<const void>& stack)> ask;
    // Tells what can be had without the GIL; may be empty.
    std::function<std::string()> askWithoutGil;
  };

  // Set once, when the module is loaded, and never freed.
  static void setSource(Source source);

  // Begins to ask, in a thread of its own.
  explicit PythonStackDump(std::shared_ptr<const void> stack);

  bool answered() const;
  // Returns whether tell() has all it can have: after a second it has waited enough.
  bool ready() const;
  // Returns what is known now.
  Told tell() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread, which may wait for the GIL for long
  std::chrono::steady_clock::time_point until_;
};

}  // namespace torchcomms_pg
