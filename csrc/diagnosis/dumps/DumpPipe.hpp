// A named pipe: when a program writes into it, the process dumps its record.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace torchcomms_pg {

class DumpPipe {
 public:
  // Returns this process's pipe, which exists until its last owner releases it. Makes the pipe if
  // none exists. The pipe's path is <prefix><rank>.pipe, as for torch's nccl backend, with the
  // prefix from process_recorder::pipePrefix(). Returns null if the prefix is empty. If the pipe
  // cannot be made, warns and returns null: no group fails for that reason.
  static std::shared_ptr<DumpPipe> hold(int rank);

  // Removes the pipe from the file system; call this before the process exits. Otherwise programs
  // that write into the pipe would wait forever for a reader.
  static void removeAtExit() noexcept;

  // Makes the pipe and starts the thread that reads it. Raises std::runtime_error.
  DumpPipe(const std::string& prefix, int rank);
  // Removes the pipe and ends the thread. Does not wait for a dump in progress.
  ~DumpPipe();
  DumpPipe(const DumpPipe&) = delete;
  DumpPipe& operator=(const DumpPipe&) = delete;

 private:
  struct Reader;

  const std::string path_;
  const pid_t pid_;  // a forked child must neither read nor remove the pipe
  std::shared_ptr<Reader> reader_;
};

}  // namespace torchcomms_pg
