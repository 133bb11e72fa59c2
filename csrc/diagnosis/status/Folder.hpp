// The folder with the sockets on which a user's processes report their status.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/FileDescriptor.hpp"

namespace torchcomms_pg::status {

// A process's rank in a group. Other processes read it from the folder if the process does not
// answer.
struct Membership {
  uint64_t group = 0;  // see MemberStatus::id
  int64_t rank = 0;    // global rank

  static void fields(auto& self, auto& visit) { visit(self.group, self.rank); }
  bool operator==(const Membership&) const = default;
};

// The files of one process in the folder: "PID-NAMESPACE.socket", and "PID-NAMESPACE.ranks" with a
// line "GROUP RANK" for each group. The files outlive a process that is killed.
struct Entry {
  uint32_t pid = 0;
  uint32_t pidSpace = 0;  // the process's pid namespace

  // Returns the files' name without the extension.
  std::string name() const { return std::to_string(pid) + "-" + std::to_string(pidSpace); }
};

// A user's folder of sockets. Thread-safe. Functions raise std::runtime_error with the reason if
// they fail, except memberships(), which returns an empty list, and remove().
class Folder {
 public:
  // Opens the folder `path`, and makes it if it does not exist. Raises if the folder belongs to
  // another user, or is open to other users.
  explicit Folder(std::string path);

  const std::string& path() const { return path_; }
  std::vector<Entry> entries() const;
  std::vector<Membership> memberships(const Entry& entry) const;

  // Makes this process's listening socket. Replaces the files of an earlier process with this pid.
  FileDescriptor listen() const;
  // Adds a membership of this process.
  void add(const Membership& membership) const;
  // Removes the files of this process.
  void remove() const noexcept;
  // Removes the files of each dead process, unless a living process is in one of its groups.
  void sweep() const;

  // Connects to the process's socket without waiting. Returns an empty descriptor if no process
  // listens.
  FileDescriptor connect(const Entry& entry) const;

  static Entry own();

 private:
  std::string inside(const std::string& name) const;
  void discard(const Entry& entry) const noexcept;

  const std::string path_;
  FileDescriptor opened_;
};

}  // namespace torchcomms_pg::status
