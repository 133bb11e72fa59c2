// The host and process of a rank, by which its peers find it.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg {

struct Peer {
  std::string host;
  // Ids of the host's boot and of the pid namespace. If both ids and the host are equal, pids name
  // the same processes, and memory can be shared. The host's name alone proves nothing: two
  // containers may have the same name.
  uint64_t boot = 0;
  uint32_t pidSpace = 0;
  uint32_t pid = 0;  // 0 if unknown
  uint64_t startTime = 0;

  static Peer self();
  // Parses what text() returned; returns a peer with pid 0 for any other text.
  static Peer parse(const std::string& text, const Peer* previous = nullptr);

  // Returns one line. `previous`: a peer whose place the reader knows, so that an equal place is
  // not repeated.
  std::string text(const Peer* previous = nullptr) const;
  std::string place() const;
  bool sameHost(const Peer& other) const {
    return boot == other.boot && pidSpace == other.pidSpace && host == other.host;
  }
  // Returns whether the process has certainly ended; always false for a process on another host.
  bool dead() const;
};

}  // namespace torchcomms_pg
