#include "comm/Peer.hpp"

#include <algorithm>
#include <sstream>

#include "shm/Process.hpp"

namespace torchcomms_pg {

namespace {

const std::string kSamePlace = "=";

}  // namespace

Peer Peer::self() {
  std::ostringstream space;
  space << std::hex << shm::bootHash() << std::dec << "-" << shm::pidSpace();
  const auto pid = shm::processId();
  auto host = shm::hostName();
  std::replace_if(host.begin(), host.end(), [](char c) { return c <= ' '; }, '_');
  return {std::move(host), space.str(), pid, shm::processStartTime(pid)};
}

Peer Peer::parse(const std::string& text, const Peer* previous) {
  std::istringstream in(text);
  Peer peer;
  in >> peer.host;
  if (peer.host == kSamePlace && previous != nullptr) {
    peer.host = previous->host;
    peer.space = previous->space;
  } else {
    in >> peer.space;
  }
  in >> peer.pid >> peer.startTime;
  return in ? peer : Peer();
}

std::string Peer::text(const Peer* previous) const {
  const bool same = previous != nullptr && sameHost(*previous);
  return (same ? kSamePlace : host + " " + space) + " " + std::to_string(pid) + " " +
         std::to_string(startTime);
}

bool Peer::dead() const {
  if (pid == 0 || startTime == 0 || shm::processAlive(pid, startTime)) {
    return false;
  }
  return sameHost(self());
}

}  // namespace torchcomms_pg
