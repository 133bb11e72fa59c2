// Place and process of a rank, as its peers can find it.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg {

struct Peer {
  std::string host;
  // Ids of the boot and the pid namespace. If these and the host are equal, pids name the same
  // processes, and memory can be shared. Two containers may have the same host name.
  uint64_t boot = 0;
  uint32_t pidSpace = 0;
  uint32_t pid = 0;  // 0 if unknown
  uint64_t startTime = 0;

  static Peer self();
  // Parses what text() returned; any other text yields pid 0.
  static Peer parse(const std::string& text, const Peer* previous = nullptr);

  // Returns one line. `previous`: a peer whose place the reader knows, so that an equal place is
  // not repeated.
  std::string text(const Peer* previous = nullptr) const;
  std::string place() const;
  bool sameHost(const Peer& other) const {
    return boot == other.boot && pidSpace == other.pidSpace && host == other.host;
  }
  // Returns whether the process has certainly ended; always false for one on another host.
  bool dead() const;
};

}  // namespace torchcomms_pg
