#include "host/Peer.hpp"

#include <algorithm>

#include "base/TextStreams.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg {

namespace {

constexpr const char* kSamePlace = "=";

// Returns the ids of the boot and the pid namespace as text.
std::string spaceOf(const Peer& peer) {
  TextWriter text;
  text << std::hex << peer.boot << "-" << std::dec << peer.pidSpace;
  return text.str();
}

}  // namespace

Peer Peer::self() {
  const auto pid = host::processId();
  auto host = host::hostName();
  std::replace_if(host.begin(), host.end(), [](char c) { return c <= ' '; }, '_');
  return {std::move(host), host::bootHash(), host::pidSpace(), pid, host::processStartTime(pid)};
}

Peer Peer::parse(const std::string& text, const Peer* previous) {
  TextReader in(text);
  Peer peer;
  in >> peer.host;
  if (peer.host == kSamePlace && previous != nullptr) {
    peer = *previous;
  } else {
    char dash = 0;
    in >> std::hex >> peer.boot >> dash >> std::dec >> peer.pidSpace;
  }
  in >> peer.pid >> peer.startTime;
  return in ? peer : Peer();
}

std::string Peer::text(const Peer* previous) const {
  const bool same = previous != nullptr && sameHost(*previous);
  return (same ? kSamePlace : host + " " + spaceOf(*this)) + " " + std::to_string(pid) + " " +
         std::to_string(startTime);
}

std::string Peer::place() const {
  return host + "/" + spaceOf(*this);
}

bool Peer::dead() const {
  if (pid == 0 || startTime == 0 || host::processAlive(pid, startTime)) {
    return false;
  }
  return sameHost(self());
}

}  // namespace torchcomms_pg
