// The recorder that the process groups of this process share, and its files.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "recorder/FlightRecorder.hpp"

namespace torchcomms_pg {

struct DumpOptions {
  std::string prefix;                         // the file is <prefix><rank>
  bool onFailure = true;                      // dumps when a recorded group fails
  std::chrono::milliseconds patience{15000};  // limit for stacks, which take the GIL
  FlightRecorder::What what;
  std::string pipe;  // beginning of the pipe's path, "": none; see DumpPipe
};

namespace process_recorder {

// Makes the recorder with the first call in a process; a later one changes the options of dumps,
// not the size.
void configure(size_t maxEntries, bool cppStacks, DumpOptions options);

// Returns the recorder. Null: it was not made, or is to record nothing.
std::shared_ptr<FlightRecorder> get();

// Writes the record to its file and returns the file's path; "" where there is no recorder. Leaves
// out the stacks where the GIL is not to be had in time. `rank` is in the name until the recorder
// knows a group. Raises std::runtime_error when the file cannot be written.
std::string dump(int rank = 0);

// Does the same, if dumps are wanted after failures. Raises nothing.
void dumpAfterFailure(int rank = 0) noexcept;

// Returns the beginning of the pipe's path, see DumpPipe; "" where nothing is recorded.
std::string pipePrefix();

}  // namespace process_recorder

// Replaces the file at `path`, which is never seen half written. Makes its
// folder. Raises std::runtime_error.
void writeDump(const std::string& path, const std::string& content);

// Registers the handlers behind the torchcomms_* pages of torch's debug server with c10d's control
// plane. Idempotent.
void registerControlPlane();

}  // namespace torchcomms_pg
