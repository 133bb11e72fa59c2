// Serves the status of this process and its job on a socket in the user's folder, and to NCCL's RAS
// client on an address that the user names.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "status/ProcessStatus.hpp"
#include "status/Protocol.hpp"
#include "status/RasDialogue.hpp"
#include "status/RasEvents.hpp"

namespace torchcomms_pg::status {

// The status of this process, before Python has been asked.
struct Description {
  ProcessStatus status;
  std::vector<std::shared_ptr<const void>> stacks;  // of operations, which Python turns into lines
  // Sets the lines that Python returned for `stacks`, in their order.
  std::function<void(ProcessStatus&, const std::vector<std::string>&)> setLines;
};

// The server of this process: a thread that uses neither the GIL nor the store, so that it answers
// whatever blocks the other threads. Bounded in clients, bytes and time. Thread-safe.
class StatusServer {
 public:
  struct Duties {
    std::function<Description()> describe;  // returns soon
    // May block; each runs in a separate thread.
    std::function<std::string(const OfJob&)> ofJob;
    std::function<std::string(const RasQuestion&)> ofRas = nullptr;
    std::function<std::vector<RasPeer>()> peers = nullptr;
  };

  // Sets the folder; if it is empty, no status is served. Does not affect a running server.
  static void setFolder(const std::string& path);
  static std::string folder();
  // Sets the address for RAS clients, see listenForRas(); if it is empty, they are not served.
  static void setRasAddress(const std::string& address);

  // Returns the server of this process, which runs while a caller holds it. Null if it is turned
  // off or cannot start; the latter is reported once on stderr.
  static std::shared_ptr<StatusServer> of(const Duties& duties);

  // Removes the files of this process, at its exit.
  static void removeAtExit() noexcept;

  explicit StatusServer(Duties duties);  // for of()
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

  // Records a rank of this process in a group, for the time when this process does not answer.
  void add(const Membership& membership) noexcept;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the threads
  const uint32_t pid_;
};

}  // namespace torchcomms_pg::status
