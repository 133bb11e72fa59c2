// A communicator, its state and its background job. csrc/shm moves the data.
#pragma once

#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "nccl/NcclApi.hpp"

namespace emulated {

// A thread that launches a group of communicators that do not block
// (src/group.cc, ncclGroupEndInternal: groupLaunchNonBlocking).
class GroupJob;

const torchcomms_pg::NcclApi& shm();

}  // namespace emulated

// Never freed: a handle that was destroyed is told from one that never existed.
struct ncclComm {
  ncclComm(int rank, int size, int device, bool blocking)
      : rank(rank), size(size), device(device), blocking(blocking) {}

  const int rank;
  const int size;
  const int device;  // current one of the thread that made it
  const bool blocking;

  std::atomic<ncclComm_t> shm{nullptr};
  // Result of ncclCommGetAsyncError; ncclInProgress until the communicator has come up.
  std::atomic<ncclResult_t> state{ncclInProgress};
  std::atomic<bool> aborted{false};
  std::atomic<bool> revoked{false};
  std::atomic<bool> finalized{false};
  std::atomic<bool> suspended{false};
  std::atomic<bool> freed{false};   // with graphs that still live
  std::atomic<bool> warned{false};  // of an error that nobody here has made
  // Captures with operations of the communicator, in graphs that still live.
  std::atomic<int> persistent{0};

  std::mutex mutex;  // guards the members below
  std::shared_ptr<emulated::GroupJob> job;
  bool jobDangles = false;                             // see ncclCommRevoke
  std::multimap<std::thread::id, std::string> inside;  // functions that threads are in
  int completing = 0;                                  // threads that complete `job`
};

namespace emulated {

using Comm = ncclComm;

// Makes a new handle.
ncclComm_t publish(std::unique_ptr<Comm> comm);
void end(Comm& comm);

// Returns ncclSuccess for a communicator that lives; else ncclInvalidArgument (src/argcheck.cc,
// CommCheck). A call on one that was destroyed is a misuse.
ncclResult_t check(ncclComm_t comm, const char* function);

// A thread inside a function of the communicator. "Only one thread operates the communicator at a
// time" (user guide, "Thread Safety"): a second one is a misuse.
class Inside {
 public:
  Inside(Comm& comm, const char* function);
  ~Inside();
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Comm& comm_;
};

// Follows src/init.cc, ncclCommGetAsyncError: returns the state; when that is ncclSuccess, and
// since 2.26, also ends the background job.
ncclResult_t asyncError(Comm& comm);

// Follows src/init.cc, ncclCommEnsureReady: returns ncclInvalidArgument while something is in
// progress, or the communicator's error; completes the background job.
ncclResult_t ensureReady(Comm& comm, const char* function);

// Returns whether peers hear of a rank that dies, aborts or revokes: over a network, whose sockets
// close. Inside a host kernels spin, and nobody is told. Ranks are on hosts of their own where
// NCCL_HOSTID says so.
bool overNetwork();

// Returns whether NCCL hears nothing of an error of csrc/shm, and its kernels wait for ever: of a
// peer inside a host, and with EMULATED_MISMATCHES_HANG of ranks that call different collectives.
bool isNotTold(ncclResult_t error);
// Returns whether the communicator has failed by such an error.
bool hasFailedUntold(Comm& comm);

// Returns `result` of csrc/shm, whose text of an error becomes NCCL's.
ncclResult_t told(ncclResult_t result, ncclComm_t shm = nullptr);

// Returns after a kernel's work: at once, unless it has failed since a peer will never come, of
// which nobody tells. Then when the communicator is aborted or revoked here. `late`: the kernel was
// launched after a revocation, which sets the abort flags back when it has ended those before
// (src/init.cc, commRevokeAsync).
void spin(Comm& comm, bool failed, bool late);

// Numbers of this process, for tests.
struct Counts {
  std::atomic<int> begun{0};     // kernels that a stream has come to
  std::atomic<int> spinning{0};  // kernels that wait for a peer that does not come
  std::atomic<int> revoked{0};   // calls of ncclCommRevoke that have returned
};

Counts& counts();

// Returns the result of a refused call; a communicator that does not block keeps it as its state
// (src/enqueue.cc, ncclEnqueueCheck: ncclCommSetAsyncError).
ncclResult_t refused(Comm& comm, ncclResult_t result, const std::string& why);

// Joins the background job, if there is one.
void completeJob(Comm& comm);

}  // namespace emulated
