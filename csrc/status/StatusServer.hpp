// Answers, on a socket in a folder of the user's, what this process and its job do; and, on an
// address that is named, NCCL's client of RAS.
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

// What a process says of itself, before Python has been asked.
struct Description {
  ProcessStatus status;
  std::vector<std::shared_ptr<const void>> stacks;  // of operations, for Python to tell
  // Sets the lines that Python has told of the stacks, in their order.
  std::function<void(ProcessStatus&, const std::vector<std::string>&)> setLines;
};

// The server of this process: a thread that takes neither the GIL nor the store, and so answers
// whatever holds up the others. Bounded in clients, bytes and time. Thread-safe.
class StatusServer {
 public:
  struct Duties {
    std::function<Description()> describe;  // returns soon
    // May take their time; each runs in a thread of its own.
    std::function<std::string(const OfJob&)> ofJob;
    std::function<std::string(const RasQuestion&)> ofRas = nullptr;
    std::function<std::vector<RasPeer>()> peers = nullptr;
  };

  // Names the folder; "": no status is given. Of a server that runs nothing changes.
  static void setFolder(const std::string& path);
  static std::string folder();
  // Names the address for clients of RAS, see listenForRas(); "": there is none.
  static void setRasAddress(const std::string& address);

  // Returns the server of this process, which runs as long as somebody holds it. Null: there is to
  // be none, or there cannot be one, which is said once on stderr.
  static std::shared_ptr<StatusServer> of(const Duties& duties);

  // Removes the files of this process, which ends.
  static void removeAtExit() noexcept;

  explicit StatusServer(Duties duties);  // for of()
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

  // Notes that this process has a rank in a group, for whom it does not answer.
  void add(const Membership& membership) noexcept;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the threads
  const uint32_t pid_;
};

}  // namespace torchcomms_pg::status
