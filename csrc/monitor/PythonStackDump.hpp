// Stacks of the Python threads of this process, for a thread that must not wait for the GIL. Knows
// nothing of Python; the bindings do.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torchcomms_pg {

// One request for the stacks, and the answer once it is there.
class PythonStackDump {
 public:
  using Stacks = std::vector<std::shared_ptr<const void>>;  // of StackSource::capture(); or null

  struct Told {
    std::string threads;                // one line for each thread
    std::vector<std::string> calledAt;  // place that each stack tells; empty where there is none
  };

  struct Source {
    // Takes the GIL.
    std::function<Told(const Stacks& stacks)> ask;
    // Tells what can be had without the GIL; may be empty.
    std::function<std::string()> askWithoutGil;
  };

  // Set once, when the module is loaded, and never freed.
  static void setSource(Source source);

  // Begins to ask, in a thread of its own.
  explicit PythonStackDump(Stacks stacks);

  std::chrono::steady_clock::time_point begun() const { return begun_; }
  bool answered() const;
  // Returns whether tell() has all it can have: after a second it has waited enough.
  bool ready() const;
  // Returns what is known now.
  Told tell() const;

  // Returns what can be had without the GIL: a line for each thread that does not run.
  static std::string seenWithoutGil();

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread, which may wait for the GIL for long
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace torchcomms_pg
