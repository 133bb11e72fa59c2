// The folder in which processes of one user leave their sockets, by which they tell their status.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torchcomms_pg::status {

// A descriptor, closed with its holder.
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

// The part of a process in a group, by which others know whose process it is when it does not
// answer.
struct Membership {
  uint64_t group = 0;  // see MemberStatus::id
  int64_t rank = 0;    // the job's number

  static void fields(auto& self, auto& visit) { visit(self.group, self.rank); }
  bool operator==(const Membership&) const = default;
};

// What is in the folder of one process: "PID-NAMESPACE.socket", and beside it ".ranks", with a line
// "GROUP RANK" for each group. Files outlive a process that is killed.
struct Entry {
  std::string name;  // without the end
  uint32_t pid = 0;
  uint32_t pidSpace = 0;
};

// Thread-safe. Every function raises std::runtime_error that says what is wrong with the folder.
class Folder {
 public:
  // `path`: made where it is not there. Refuses one that is another user's, or open to others.
  explicit Folder(std::string path);

  const std::string& path() const { return path_; }
  std::vector<Entry> entries() const;
  std::vector<Membership> memberships(const Entry& entry) const;

  // Makes the socket of this process, which listens, in the place of one that nobody listens at.
  Descriptor listen() const;
  // Adds to the memberships of this process.
  void add(const Membership& membership) const;
  // Removes what is of this process.
  void remove() const noexcept;
  // Removes what is left of dead processes whose groups no living one has.
  void sweep() const;

  // Connects to the socket without waiting; none: nobody listens there.
  Descriptor connect(const Entry& entry) const;

  static Entry own();

 private:
  std::string inside(const std::string& name) const;

  const std::string path_;
  Descriptor opened_;
};

// Returns whether the process at the other end is of this user.
bool ofThisUser(int socket);

}  // namespace torchcomms_pg::status
