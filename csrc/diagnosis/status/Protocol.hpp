// Questions and answers on the sockets of processes.
//
// A question is a line, "process" or "job LATE_MS WAIT_MS". The answer is a line "ok BYTES" and as
// many bytes, or a line "no WHY". Then the connection ends. A line "news STORE" has no answer: the
// process is to look for news in its store, whose name has this hash.
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace torchcomms_pg::status {

inline constexpr size_t kLongestQuestion = 128;
inline constexpr size_t kLongestAnswer = size_t{1} << 28;
inline constexpr char kOfProcess[] = "process\n";

// The question for the status of the whole job.
struct OfJob {
  int64_t lateMs = 0;  // see JobQuestion
  int64_t waitMs = 0;  // limit of the wait for answers
};

inline std::optional<OfJob> parseOfJob(const std::string& line) {
  constexpr int64_t kLongestWait = 60'000;
  long long late = 0;
  long long wait = 0;
  char end = '\0';
  if (std::sscanf(line.c_str(), "job %lld %lld%c", &late, &wait, &end) != 3 || end != '\n' ||
      late < 0 || wait < 0 || wait > kLongestWait) {
    return std::nullopt;
  }
  return OfJob{late, wait};
}

inline std::string aboutNews(uint64_t store) {
  return "news " + std::to_string(store) + "\n";
}
inline std::optional<uint64_t> parseAboutNews(const std::string& line) {
  unsigned long long store = 0;
  char end = '\0';
  return std::sscanf(line.c_str(), "news %llu%c", &store, &end) == 2 && end == '\n'
             ? std::optional<uint64_t>(store)
             : std::nullopt;
}

inline std::string answered(const std::string& body) {
  return "ok " + std::to_string(body.size()) + "\n" + body;
}
inline std::string refused(const std::string& why) {
  return "no " + why + "\n";
}

// Returns the body of an answer, or nullopt if the answer is incomplete or a refusal.
inline std::optional<std::string> bodyOf(const std::string& answer) {
  unsigned long long bytes = 0;
  const auto line = answer.find('\n');
  if (line == std::string::npos || std::sscanf(answer.c_str(), "ok %llu", &bytes) != 1 ||
      answer.size() - line - 1 != bytes) {
    return std::nullopt;
  }
  return answer.substr(line + 1);
}

}  // namespace torchcomms_pg::status
