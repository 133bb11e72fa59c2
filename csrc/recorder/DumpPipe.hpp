// A named pipe that makes the process dump its record when a program writes to it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace torchcomms_pg {

class DumpPipe {
 public:
  // Returns this process's pipe, at <prefix><rank>.pipe as torch's nccl backend has it, until the
  // last holder lets go of it. Makes it where there is none, by the prefix that
  // process_recorder::configure() was given; null without one, and with a warning where it cannot
  // be made: no group fails for want of it.
  static std::shared_ptr<DumpPipe> hold(int rank);

  // Removes the pipe from the file system before the process ends: programs that write to it would
  // wait for a reader for ever.
  static void removeAtExit() noexcept;

  // Opens the pipe and starts the thread that reads it. Raises std::runtime_error.
  DumpPipe(const std::string& prefix, int rank);
  // Does not wait for a dump that is under way.
  ~DumpPipe();
  DumpPipe(const DumpPipe&) = delete;
  DumpPipe& operator=(const DumpPipe&) = delete;

 private:
  struct Reader;

  void remove() noexcept;

  const std::string path_;
  const pid_t pid_;  // a forked child neither reads the pipe nor removes it
  std::shared_ptr<Reader> reader_;
};

}  // namespace torchcomms_pg
