// Where a rank runs, as its peers can find it.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg {

struct Peer {
  std::string host;
  // Where host, boot and pid namespace are the same, so are the processes that a pid names, and
  // memory can be shared. Two containers may have one host name.
  uint64_t boot = 0;
  uint32_t pidSpace = 0;
  uint32_t pid = 0;  // 0: not known
  uint64_t startTime = 0;

  static Peer self();
  // What text() gave; anything else is nobody, with pid 0.
  static Peer parse(const std::string& text, const Peer* previous = nullptr);

  // One line. `previous`: whoever reads it will know that one, whose place need not be said again.
  std::string text(const Peer* previous = nullptr) const;
  std::string place() const;
  bool sameHost(const Peer& other) const {
    return boot == other.boot && pidSpace == other.pidSpace && host == other.host;
  }
  // Whether the process has ended for certain; never of one on another host.
  bool dead() const;
};

}  // namespace torchcomms_pg
