// Gets the stacks of this process's Python threads for a thread that must not wait for the GIL.
// Independent of Python; the bindings read the stacks.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "diagnosis/rank/RankStatus.hpp"

namespace torchcomms_pg {

// One request for the stacks, and its answer.
class PythonStackDump {
 public:
  // results of StackSource::capture(), or null
  using Stacks = std::vector<std::shared_ptr<const void>>;

  struct Told {
    std::string threads;                         // one line for each thread
    std::vector<std::string> calledAt;           // for each stack its line of Python, or ""
    std::map<uint64_t, std::string> names = {};  // of the threads, by threadNumber()

    // Sets `wait.threadName` from `names`.
    void name(Wait& wait) const;
    // Forgets issuing threads that are gone, or not Python's: it is then unknown which thread is to
    // issue the next operation.
    void forgetGone(GroupCounts& counts) const;
  };

  struct Source {
    // Takes the GIL, calls `held`, and returns the answer.
    std::function<Told(const Stacks& stacks, const std::function<void()>& held)> ask;
    // Returns the stacks that can be read without the GIL, or "". Copies the process, which may
    // take a second and memory; returns "" at once if memory is short.
    std::function<std::string()> askWithoutGil;
    uint64_t mainThread = 0;  // by threadNumber()
  };

  // Sets the source of stacks, which is never freed. Called once, when the module is loaded.
  static void setSource(Source source);

  // Returns Python's main thread, by threadNumber(), or 0 without a source.
  static uint64_t mainThread();

  // Starts to ask Python in a separate thread. `stacks`: also asks for the line of each.
  explicit PythonStackDump(Stacks stacks);

  std::chrono::steady_clock::time_point begun() const { return begun_; }
  bool answered() const;
  // Returns whether to stop waiting: once the answer has arrived; after a second, if another thread
  // certainly holds the GIL and no stacks are being read; otherwise after two seconds. If another
  // thread has held the GIL for a while, has a separate thread read the stacks without it, at most
  // once in kReading for all who ask.
  bool ready() const;
  // Returns the answer, or what is known without it; `calledAt` is empty then. Never waits, and
  // makes no copy of the process.
  Told tell() const;
  // Returns whether the asking thread has often found that another thread holds the GIL.
  bool gilIsHeld() const;

  // Returns the stacks that have been read without the GIL while a thread has held it, a line for
  // each thread that did not run; "" before that.
  static std::string seenWithoutGil();
  static constexpr std::chrono::seconds kReading{10};

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread, which may wait long for the GIL
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace torchcomms_pg
