// Place and process of a rank, as its peers can find it.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg {

struct Peer {
  std::string host;
  // Ids of the boot and the pid namespace. Where these and the host are the same, so are the
  // processes that a pid names, and memory can be shared. Two containers may have one host name.
  uint64_t boot = 0;
  uint32_t pidSpace = 0;
  uint32_t pid = 0;  // 0: not known
  uint64_t startTime = 0;

  static Peer self();
  // Parses what text() gave; any other text gives pid 0.
  static Peer parse(const std::string& text, const Peer* previous = nullptr);

  // Writes one line. `previous`: a peer whose place the reader knows, so that it is not repeated.
  std::string text(const Peer* previous = nullptr) const;
  std::string place() const;
  bool sameHost(const Peer& other) const {
    return boot == other.boot && pidSpace == other.pidSpace && host == other.host;
  }
  // Returns whether the process has ended for certain; never for one on another host.
  bool dead() const;
};

}  // namespace torchcomms_pg
