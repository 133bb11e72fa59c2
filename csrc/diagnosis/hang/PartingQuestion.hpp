// Asks Python where two ranks have taken different ways, for a thread that must not wait for the
// GIL. Independent of Python; the bindings answer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torchcomms_pg {

// One question, and its answer.
class PartingQuestion {
 public:
  // Only Python (torchcomms_pg/parting) reads the texts that two ranks exchange.
  struct Asked {
    // "tell": returns this rank's places, earlier ones and the latest. "compare": compares this
    // with what the peer has told, and returns what to read on the peer, or "" if nothing is known.
    // "read": returns what was asked for. "conclude": returns where the ranks parted, a line of
    // JSON and then lines for people; or "".
    std::string step;
    std::string group;
    uint64_t number = 0;             // of the collective in which a rank waits
    int64_t rank = 0;                // this process's global rank
    std::vector<std::string> texts;  // compare: the peer's text, then both sides' names

    static void fields(auto& self, auto& visit) {
      visit(self.step, self.group, self.number, self.rank, self.texts);
    }
  };
  using Source = std::function<std::string(const Asked& asked)>;

  // Sets the source of answers, which is never freed. An empty function: no source.
  static void setSource(Source source);
  // Returns whether a source is set.
  static bool known();

  // Starts to ask in a separate thread.
  explicit PartingQuestion(Asked asked);

  // Returns the answer, or nullopt if Python has not answered yet.
  std::optional<std::string> answer() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the thread, which may wait long for the GIL
};

}  // namespace torchcomms_pg
