// The folder in which a user's processes put the sockets on which they report their status.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torchcomms_pg::status {

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();
  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

// A rank of a process in a group, by which other processes name the process if it does not answer.
struct Membership {
  uint64_t group = 0;  // see MemberStatus::id
  int64_t rank = 0;    // global rank

  static void fields(auto& self, auto& visit) { visit(self.group, self.rank); }
  bool operator==(const Membership&) const = default;
};

// The files of one process in the folder: "PID-NAMESPACE.socket", and "PID-NAMESPACE.ranks" with a
// line "GROUP RANK" for each group. They outlive a process that is killed.
struct Entry {
  std::string name;  // without the extension
  uint32_t pid = 0;
  uint32_t pidSpace = 0;
};

// Thread-safe. Every function raises std::runtime_error with what is wrong with the folder.
class Folder {
 public:
  // Opens the folder `path`, and makes it if it does not exist. Refuses a folder that is another
  // user's or open to others.
  explicit Folder(std::string path);

  const std::string& path() const { return path_; }
  std::vector<Entry> entries() const;
  std::vector<Membership> memberships(const Entry& entry) const;

  // Makes this process's listening socket. Replaces one of the same name on which no process
  // listens.
  Descriptor listen() const;
  // Adds to the memberships of this process.
  void add(const Membership& membership) const;
  // Removes the files of this process.
  void remove() const noexcept;
  // Removes the files of dead processes, except those with a group in which a process still lives.
  void sweep() const;

  // Connects to the socket without waiting. Returns an empty descriptor if no process listens on
  // it.
  Descriptor connect(const Entry& entry) const;

  static Entry own();

 private:
  std::string inside(const std::string& name) const;

  const std::string path_;
  Descriptor opened_;
};

// Returns whether the process at the other end belongs to this user.
bool ofThisUser(int socket);

}  // namespace torchcomms_pg::status
