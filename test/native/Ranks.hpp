// Ranks as threads of this process or as processes of their own.
#pragma once

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "Check.hpp"
#include "shm/api/Api.hpp"

namespace test {

// NCCL's functions over shared memory.
inline const torchcomms_pg::NcclApi& nccl() {
  return torchcomms_pg::shm::ncclFunctions();
}

// The library over shared memory, for what NCCL lacks.
inline const torchcomms_pg::Library& library() {
  return torchcomms_pg::shm::library();
}

inline ncclResult_t sendTagged(
    torchcomms_pg::Message message, ncclComm_t comm, cudaStream_t stream) {
  message.sending = true;
  return library().run(message, comm, stream);
}

inline ncclResult_t recvTagged(
    torchcomms_pg::Message message, ncclComm_t comm, cudaStream_t stream) {
  message.sending = false;
  return library().run(message, comm, stream);
}

#define CHECK_NCCL(call)                                                            \
  do {                                                                              \
    const ncclResult_t result_ = (call);                                            \
    if (result_ != ncclSuccess) {                                                   \
      ::test::stop(                                                                 \
          __FILE__, __LINE__,                                                       \
          std::string(#call ": ") + ::test::nccl().getErrorString(result_) + ": " + \
              ::test::nccl().getLastError(nullptr));                                \
    }                                                                               \
  } while (false)

inline ncclUniqueId uniqueId() {
  ncclUniqueId id;
  CHECK_NCCL(nccl().getUniqueId(&id));
  return id;
}

inline ncclComm_t init(const ncclUniqueId& id, int ranks, int rank) {
  ncclComm_t comm = nullptr;
  CHECK_NCCL(nccl().commInitRankConfig(&comm, ranks, id, rank, nullptr));
  return comm;
}

inline ncclResult_t barrier(ncclComm_t comm) {
  return library().run({.kind = torchcomms_pg::CollectiveKind::barrier}, comm, nullptr);
}

// Runs body(rank) in one thread per rank.
inline void threads(int ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> all;
  for (int rank = 0; rank < ranks; ++rank) all.emplace_back(body, rank);
  for (std::thread& thread : all) thread.join();
}

// Runs body(comm, rank) in one thread per rank of a communicator.
inline void threadRanks(int ranks, const std::function<void(ncclComm_t, int)>& body) {
  const ncclUniqueId id = uniqueId();
  threads(ranks, [&](int rank) {
    const ncclComm_t comm = init(id, ranks, rank);
    body(comm, rank);
    CHECK_NCCL(nccl().commDestroy(comm));
  });
}

// Waits until all other threads of this process sleep.
inline void awaitOthersAsleep() {
  const std::string self = std::to_string(gettid());
  for (bool asleep = false; !asleep;) {
    asleep = true;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string text;
      std::getline(std::ifstream(entry.path() / "stat"), text);
      const size_t name = text.rfind(") ");  // see proc(5): the state follows
      const bool ended = name == std::string::npos;
      if (ended || entry.path().filename() == self) continue;
      asleep = asleep && text[name + 2] == 'S';
    }
    if (!asleep) std::this_thread::yield();
  }
}

class Processes {
 public:
  void start(const std::function<void()>& body) {
#if defined(__SANITIZE_ADDRESS__)
    // A thread that starts or allocates holds locks of GCC's AddressSanitizer, which a forked child
    // does not make anew.
    awaitOthersAsleep();
#endif
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      body();
      std::exit(0);
    }
    pids_.push_back(child);
  }
  pid_t pid(int index) const { return pids_[index]; }

  // Waits for a process to end; it must have succeeded.
  void join(int index) {
    int status = 0;
    CHECK(waitpid(pids_[index], &status, 0) == pids_[index]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  void joinAll() {
    for (size_t i = 0; i < pids_.size(); ++i) join(static_cast<int>(i));
  }
  // Kills a process, which then does not count as a failure.
  void kill(int index) {
    ::kill(pids_[index], SIGKILL);
    int status = 0;
    CHECK(waitpid(pids_[index], &status, 0) == pids_[index]);
  }

 private:
  std::vector<pid_t> pids_;
};

// Runs body(comm, rank) in one process per rank. The id is made by this process.
inline void processRanks(int ranks, const std::function<void(ncclComm_t, int)>& body) {
  const ncclUniqueId id = uniqueId();
  Processes processes;
  for (int rank = 0; rank < ranks; ++rank) {
    processes.start([&, rank] {
      const ncclComm_t comm = init(id, ranks, rank);
      body(comm, rank);
      CHECK_NCCL(nccl().commDestroy(comm));
    });
  }
  processes.joinAll();
}

// Returns the number of this process's descriptors.
inline int descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Returns how often the memory of communicators and windows is mapped in this process.
inline int mappedSegments() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:torchcomms_pg") != std::string::npos;
  return count;
}

}  // namespace test
