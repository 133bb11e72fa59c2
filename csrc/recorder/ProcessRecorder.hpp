// The flight recorder that all groups of this process share, and its files.
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
  std::string pipe;  // beginning of the pipe's path, see DumpPipe; "" for no pipe
};

namespace process_recorder {

// Makes the recorder on the first call in a process. A later call changes the options of dumps, not
// the size.
void configure(size_t maxEntries, bool cppStacks, DumpOptions options);

// Returns the recorder, or null if configure() has not been called or its size is 0.
std::shared_ptr<FlightRecorder> get();

// Writes the record to its file and returns the file's path, or "" if no recorder exists. Leaves
// out the stacks if the GIL cannot be had in time. The file's name ends with the recorder's rank,
// or with `rank` as long as no group was added. Raises std::runtime_error if the file cannot be
// written.
std::string dump(int rank = 0);

// Does the same if the options ask for dumps after failures. Raises nothing.
void dumpAfterFailure(int rank = 0) noexcept;

// Returns the beginning of the pipe's path, see DumpPipe, or "" if nothing is recorded.
std::string pipePrefix();

}  // namespace process_recorder

// Replaces the file at `path` atomically. Makes its folder. Raises std::runtime_error.
void writeDump(const std::string& path, const std::string& content);

// Registers the handlers behind the torchcomms_* pages of torch's debug server with c10d's control
// plane. Idempotent.
void registerControlPlane();

}  // namespace torchcomms_pg
