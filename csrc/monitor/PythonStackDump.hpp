// Gets the stacks of this process's Python threads for a thread that must not wait for the GIL.
// Independent of Python; the bindings read the stacks.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torchcomms_pg {

// One request for the stacks, and its answer.
class PythonStackDump {
 public:
  // results of StackSource::capture(), or null
  using Stacks = std::vector<std::shared_ptr<const void>>;

  struct Told {
    std::string threads;                // one line for each thread
    std::vector<std::string> calledAt;  // for each stack its line of Python, or ""
  };

  struct Source {
    // Takes the GIL, calls `held`, and returns the answer.
    std::function<Told(const Stacks& stacks, const std::function<void()>& held)> ask;
    // Returns the stacks that can be read without the GIL, or "".
    std::function<std::string()> askWithoutGil;
  };

  // Sets the source of stacks, which is never freed. Called once, when the module is loaded.
  static void setSource(Source source);

  // Starts to ask Python in a separate thread. `stacks`: also asks for the line of each.
  explicit PythonStackDump(Stacks stacks);

  std::chrono::steady_clock::time_point begun() const { return begun_; }
  bool answered() const;
  // Returns whether to stop waiting: the answer has arrived, or a second has passed and another
  // thread certainly holds the GIL, or two seconds have passed.
  bool ready() const;
  // Returns the answer, or what is known without it; `calledAt` is empty then.
  Told tell() const;

  // Returns the stacks that can be read without the GIL, a line for each thread that does not run.
  static std::string seenWithoutGil();

 private:
  // Returns whether the asking thread has often found that another thread holds the GIL.
  bool gilIsHeld() const;

  struct State;
  std::shared_ptr<State> state_;  // shared with the thread, which may wait long for the GIL
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace torchcomms_pg
