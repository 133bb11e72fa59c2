// An owner of a file descriptor.
#pragma once

#include <unistd.h>

#include <utility>

namespace torchcomms_pg {

// Closes the descriptor, if it has one, when it is destroyed.
class FileDescriptor {
 public:
  // `number`: an open descriptor, or a negative number for none.
  explicit FileDescriptor(int number = -1) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept : number_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~FileDescriptor() {
    if (number_ >= 0) {
      ::close(number_);
    }
  }
  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

}  // namespace torchcomms_pg
