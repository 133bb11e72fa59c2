#include "diagnosis/status/RasDialogue.hpp"

#include <strings.h>

#include <algorithm>
#include <charconv>

#include "monitor/Printable.hpp"

namespace torchcomms_pg::status {

namespace {

constexpr char kDone[] = "OK\n";

bool same(const std::string& one, const char* other) {
  return strcasecmp(one.c_str(), other) == 0;
}

// Returns the rest of the line after `word` and a blank, or nullopt if the line begins otherwise.
std::optional<std::string> after(const std::string& line, const std::string& word) {
  const auto begin = word + " ";
  if (strncasecmp(line.c_str(), begin.c_str(), begin.size()) != 0) {
    return std::nullopt;
  }
  return line.substr(begin.size());
}

}  // namespace

bool RasDialogue::hear(std::string_view bytes, std::string& answers) {
  heard_ += bytes;
  size_t begin = 0;
  for (size_t end; !asked_ && (end = heard_.find('\n', begin)) != std::string::npos;) {
    auto line = heard_.substr(begin, end - begin);
    begin = end + 1;
    if (line.size() > kLongestLine) {
      return false;
    }
    if (line.ends_with('\r')) {
      line.pop_back();  // telnet ends lines with "\r\n"
    }
    answers += obey(line);
  }
  heard_.erase(0, begin);
  return asked_ || heard_.size() <= kLongestLine;
}

std::string RasDialogue::obey(const std::string& line) {
  if (after(line, "CLIENT PROTOCOL")) {
    return "SERVER PROTOCOL 2\n";
  }
  if (const auto seconds = after(line, "TIMEOUT")) {
    return setTimeout(*seconds);
  }
  if (const auto format = after(line, "SET FORMAT")) {
    if (!same(*format, "text") && !same(*format, "json")) {
      return refused("the format is text or json, not " + printable(*format));
    }
    question_.json = same(*format, "json");
    return kDone;
  }
  if (same(line, "STATUS") || same(line, "VERBOSE STATUS")) {
    question_.verbose = !same(line, "STATUS");
    asked_ = question_;
    return "";
  }
  if (same(line, "MONITOR")) {
    return setEvents("lifecycle");
  }
  if (const auto groups = after(line, "MONITOR")) {
    return setEvents(*groups);
  }
  return refused("no command of RAS protocol 2: " + printable(line));
}

std::string RasDialogue::setTimeout(const std::string& seconds) {
  int64_t wanted = -1;
  const auto* const end = seconds.data() + seconds.size();
  const auto [rest, error] = std::from_chars(seconds.data(), end, wanted);
  if (error != std::errc() || rest != end || wanted < 0) {
    return refused("a timeout is a whole number of seconds, not " + printable(seconds));
  }
  // 0 asks for no limit, but this server always has a limit.
  question_.waitMs = wanted == 0 ? kLongestWait : std::min(wanted, kLongestWait / 1000) * 1000;
  return kDone;
}

std::string RasDialogue::setEvents(const std::string& groups) {
  uint8_t wanted = 0;
  for (size_t begin = 0; begin <= groups.size();) {
    const auto end = std::min(groups.find(',', begin), groups.size());
    const auto name = groups.substr(begin, end - begin);
    const auto of = same(name, "lifecycle") ? RasEvents::lifecycle
                    : same(name, "trace")   ? RasEvents::trace
                    : same(name, "all")     ? RasEvents::all
                                            : RasEvents::none;
    if (of == RasEvents::none) {
      return refused("events are lifecycle, trace or all, not " + printable(name));
    }
    wanted |= static_cast<uint8_t>(of);
    begin = end + 1;
  }
  events_ = static_cast<RasEvents>(wanted);
  return kDone;
}

}  // namespace torchcomms_pg::status
