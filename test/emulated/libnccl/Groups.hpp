// Groups: the calls between ncclGroupStart and ncclGroupEnd, or a call alone (src/group.cc).
#pragma once

#include <nccl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "host/HostStream.hpp"
#include "libnccl/Communicator.hpp"

namespace emulated {

struct Task {
  Comm* comm;
  // True for setting up and taking down: each of a group runs in a thread of its own, before the
  // operations (ncclAsyncLaunch).
  bool setup;
  std::function<ncclResult_t()> run;
  // Where an operation queues its kernel; no stream: it is captured, or no operation.
  int device = 0;
  torchcomms_pg::host::HostStream* stream = nullptr;
};

// The launch of a group in the background.
class GroupJob {
 public:
  explicit GroupJob(std::function<void()> body) : thread_(std::move(body)) {}
  ~GroupJob();
  GroupJob(const GroupJob&) = delete;
  GroupJob& operator=(const GroupJob&) = delete;

  void join();

 private:
  std::mutex mutex_;
  std::thread thread_;
};

// A place where a test can hold the background up.
class Gate {
 public:
  void pass() {
    ++held_;
    closed_.wait(true);
    --held_;
  }
  int held() const { return held_; }
  void close(bool closed) {
    closed_.store(closed);
    closed_.notify_all();
  }

 private:
  std::atomic<bool> closed_{false};
  std::atomic<int> held_{0};
};

struct Gates {
  Gate launch;    // before a group of operations
  Gate finalize;  // in ncclCommFinalize
  Gate end;       // when a thread that has set the communicators' state ends
};
Gates& gates();

void groupStart();
ncclResult_t groupEnd();
// Notes that a call in the group has failed: nothing of it is launched (ncclGroupErrCheck).
void failGroup(ncclResult_t error);

// Adds to the open group, or launches at once. Returns the function's result.
ncclResult_t submit(Task task);

}  // namespace emulated
