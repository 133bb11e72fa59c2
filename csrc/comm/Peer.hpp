// Where a rank runs, as its peers can find it.
#pragma once

#include <cstdint>
#include <string>

namespace torchcomms_pg {

struct Peer {
  std::string host;
  // Of the boot and the pid namespace: where host and this are the same, so are the processes that
  // a pid names, and memory can be shared. Two containers may have one host name.
  std::string space;
  uint32_t pid = 0;  // 0: not known
  uint64_t startTime = 0;

  static Peer self();
  // What text() gave; anything else is nobody, with pid 0.
  static Peer parse(const std::string& text, const Peer* previous = nullptr);

  // One line. `previous`: whoever reads it will know that one, whose place need not be said again.
  std::string text(const Peer* previous = nullptr) const;
  std::string place() const { return host + "/" + space; }
  bool sameHost(const Peer& other) const { return host == other.host && space == other.space; }
  // Whether the process has ended for certain; never of one on another host.
  bool dead() const;
};

}  // namespace torchcomms_pg
