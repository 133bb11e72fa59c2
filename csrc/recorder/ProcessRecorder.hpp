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
  std::chrono::milliseconds patience{15000};  // time limit for stacks, which need the GIL
  FlightRecorder::What what;
  std::string pipe;  // beginning of the pipe's path, see DumpPipe; "" for no pipe
};

namespace process_recorder {

// Makes the recorder on the first call in a process. A later call changes only the options of
// dumps.
void configure(size_t maxEntries, bool cppStacks, DumpOptions options);

// Returns the recorder, or null if configure() has not been called or `maxEntries` was 0.
std::shared_ptr<FlightRecorder> get();

// Writes the record to its file and returns the file's path, or "" if no recorder exists. Leaves
// out the stacks if they need longer than DumpOptions::patience. The file's name ends with the
// recorder's rank, or with `rank` if no group has been added. Raises std::runtime_error if the file
// cannot be written.
// `most`: limits the patience further.
std::string dump(int rank = 0, std::chrono::milliseconds most = std::chrono::milliseconds::max());

// Does the same if the options ask for dumps after failures. Prints an error instead of raising it.
void dumpAfterFailure(
    int rank = 0, std::chrono::milliseconds most = std::chrono::milliseconds::max()) noexcept;

// Returns the beginning of the pipe's path, see DumpPipe, or "" for no pipe.
std::string pipePrefix();

}  // namespace process_recorder

// Replaces the file at `path` atomically. Makes the file's folder. Raises std::runtime_error.
void writeDump(const std::string& path, const std::string& content);

}  // namespace torchcomms_pg
