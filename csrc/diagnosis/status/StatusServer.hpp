// Serves the status of this process and its job, on a socket in the user's folder.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "diagnosis/status/Gateway.hpp"
#include "diagnosis/status/ProcessStatus.hpp"
#include "diagnosis/status/Protocol.hpp"

namespace torchcomms_pg::status {

// The status of this process, before Python has been asked.
struct Description {
  ProcessStatus status;
  std::vector<std::shared_ptr<const void>> stacks;  // of operations; Python returns a line for each
  // Fills in the lines that Python returned, one for each of `stacks`, in the same order.
  std::function<void(ProcessStatus&, const std::vector<std::string>&)> setLines;
};

// The server of this process: a thread that uses neither the GIL nor the store, so that it answers
// even if all other threads are blocked. Limits the number of clients, and each client's bytes and
// time. Thread-safe.
class StatusServer {
 public:
  struct Duties {
    std::function<Description()> describe;           // must return soon
    std::function<std::string(const OfJob&)> ofJob;  // may block: called in a separate thread
    std::function<void(uint64_t store)> news;        // see News::look(); must return soon
  };

  // Sets the folder; if `path` is empty, no status is served. `gateway`: the command that a server
  // runs at its start, with the name of its files in the folder as a further word. Does not affect
  // a running server.
  static void setFolder(const std::string& path, GatewayCommand gateway = {});
  static std::string folder();

  // Returns the server of this process, which runs while a caller holds it. Returns null if no
  // folder is set, or if the server cannot start, which is reported once on stderr.
  static std::shared_ptr<StatusServer> of(const Duties& duties);

  // Returns whether this process has a server.
  static bool runs();

  // Removes the files of this process from the folder. Called at the process's exit.
  static void removeAtExit() noexcept;

  explicit StatusServer(Duties duties);  // for of()
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

  // Records a rank of this process in the folder, for other processes to read if this process does
  // not answer.
  void add(const Membership& membership) noexcept;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the threads
  const uint32_t pid_;
};

}  // namespace torchcomms_pg::status
