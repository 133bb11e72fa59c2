// A named pipe that makes the process dump its record when a program writes to it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace torchcomms_pg {

class DumpPipe {
 public:
  // Returns this process's pipe, which exists until its last owner releases it. Its path is
  // <prefix><rank>.pipe, as for torch's nccl backend, with the prefix of
  // process_recorder::configure(). Makes the pipe if none exists. Returns null without a prefix,
  // or, with a warning, if the pipe cannot be made: no group fails for that reason.
  static std::shared_ptr<DumpPipe> hold(int rank);

  // Removes the pipe from the file system before the process exits. Otherwise programs that write
  // to it would wait forever for a reader.
  static void removeAtExit() noexcept;

  // Opens the pipe and starts the thread that reads it. Raises std::runtime_error.
  DumpPipe(const std::string& prefix, int rank);
  // Does not wait for a dump in progress.
  ~DumpPipe();
  DumpPipe(const DumpPipe&) = delete;
  DumpPipe& operator=(const DumpPipe&) = delete;

 private:
  struct Reader;

  void remove() noexcept;

  const std::string path_;
  const pid_t pid_;  // a forked child must neither read nor remove the pipe
  std::shared_ptr<Reader> reader_;
};

}  // namespace torchcomms_pg
