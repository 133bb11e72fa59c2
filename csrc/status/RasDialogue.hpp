// The lines in which NCCL's client of RAS, ncclras, asks: those of protocol 2 (NCCL 2.30, src/ras).
//
// A client says, in any case and order, "CLIENT PROTOCOL N", "TIMEOUT SECONDS", "SET FORMAT text"
// or "json", and "MONITOR" or "MONITOR GROUPS", each of which has an answer of one line, and
// "STATUS" or "VERBOSE STATUS", which ends what it says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace torchcomms_pg::status {

// The question for the status of the job.
struct RasQuestion {
  bool json = false;
  bool verbose = false;
  // Time for which answers are waited for: of a client that names none less than the second for
  // which some of them read.
  int64_t waitMs = 800;
};

enum class RasEvents : uint8_t { none = 0, lifecycle = 1, trace = 2, all = 3 };

// What a client has said so far.
class RasDialogue {
 public:
  // Limit of a line, and of the answers that a client has not read before more of it is read.
  static constexpr size_t kLongestLine = 1024;
  // Limit of the time for which answers are waited for, which keeps others waiting.
  static constexpr int64_t kLongestWait = 10'000;

  // Takes what a client has sent, and appends the answers to `answers`. Returns false for a line
  // that is too long.
  bool hear(std::string_view bytes, std::string& answers);

  // Returns what it has asked for; none: it has not. Nothing is heard after that.
  const std::optional<RasQuestion>& asked() const { return asked_; }
  // Returns of which events it wants to be told, and whether as JSON.
  RasEvents events() const { return events_; }
  bool json() const { return question_.json; }

  // Returns the line that says that there is no answer.
  static std::string refused(const std::string& why) { return "ERROR: " + why + "\n"; }

 private:
  std::string obey(std::string line);
  std::string setTimeout(const std::string& seconds);
  std::string setEvents(const std::string& groups);

  std::string heard_;  // the part of a line that has come
  RasQuestion question_;
  std::optional<RasQuestion> asked_;
  RasEvents events_ = RasEvents::none;
};

}  // namespace torchcomms_pg::status
