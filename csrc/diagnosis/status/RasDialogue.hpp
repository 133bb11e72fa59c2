// The dialogue with NCCL's RAS client, ncclras, in protocol 2 (NCCL 2.30, src/ras).
//
// A client sends lines in any order, in upper or lower case: "CLIENT PROTOCOL N", "TIMEOUT
// SECONDS", "SET FORMAT text" or "json", and "MONITOR" or "MONITOR GROUPS". Each line gets an
// answer of one line. "STATUS" or "VERBOSE STATUS" ends the dialogue, and gets the status as its
// answer.
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
  // Limit of the wait for answers. The default is below one second, since some clients set no
  // timeout and read for one second only.
  int64_t waitMs = 800;
};

enum class RasEvents : uint8_t { none = 0, lifecycle = 1, trace = 2, all = 3 };

// The lines that one client has sent so far.
class RasDialogue {
 public:
  // Limit of a line, in bytes. Also, the server stops reading from a client while this many bytes
  // of its answers are unsent.
  static constexpr size_t kLongestLine = 1024;
  // Limit of the wait for answers, in ms. Other clients wait meanwhile, too.
  static constexpr int64_t kLongestWait = 10'000;

  // Takes bytes that the client has sent, and appends the answers to `answers`. Returns false if a
  // line is too long.
  bool hear(std::string_view bytes, std::string& answers);

  // Returns the client's question, or nullopt if it has not asked. Later lines are ignored.
  const std::optional<RasQuestion>& asked() const { return asked_; }
  // Return which events the client wants, and whether as JSON.
  RasEvents events() const { return events_; }
  bool json() const { return question_.json; }

  // Returns the line that refuses a command or question.
  static std::string refused(const std::string& why) { return "ERROR: " + why + "\n"; }

 private:
  std::string obey(const std::string& line);
  std::string setTimeout(const std::string& seconds);
  std::string setEvents(const std::string& groups);

  std::string heard_;  // the received part of an incomplete line
  RasQuestion question_;
  std::optional<RasQuestion> asked_;
  RasEvents events_ = RasEvents::none;
};

}  // namespace torchcomms_pg::status
