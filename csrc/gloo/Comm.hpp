// A group of ranks on several hosts: shared memory inside a host, Gloo between hosts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/WorkerStream.hpp"
#include "gloo/Fault.hpp"
#include "gloo/Link.hpp"
#include "gloo/Messages.hpp"
#include "gloo/Scratch.hpp"
#include "gloo/Topology.hpp"
#include "host/Collective.hpp"
#include "nccl/NcclApi.hpp"
#include "shm/Comm.hpp"

namespace torchcomms_pg::gloo {

// Time when the ranks are connected: in the constructor, which then is collective and raises what
// Connect raises, or with the first rank that communicates, see Link::awaitConnections().
enum class Connected { now, whenNeeded };

// The parts that a communicator is made of.
struct Members {
  c10::intrusive_ptr<c10d::Store> store;  // for this communicator alone
  std::shared_ptr<const Topology> topology;
  ncclComm_t inside = nullptr;  // of shm::api(): the ranks of this host, in order. Owned
  Connect connect;
  std::chrono::milliseconds timeout;  // to connect the ranks
  // Returns how a rank's process has ended, such as "rank 3 (pid 5) died"; "": it may run.
  std::function<std::string(int rank)> died;
};

// Elements of an exchange for or from one rank.
struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};

// Gloo moves bytes, and the arithmetic is that of the shared-memory library: every type and
// reduction of NCCL, reduced host by host in rank order, to the same bits on every rank.
// Execution.hpp says what a collective consists of.
//
// Thread-safe. Operations raise host::NcclError, with the group's ranks.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  // Makes a communicator. `look`: see Link::connect().
  static std::shared_ptr<Comm> make(
      Members members, Connected connected, const std::function<void()>& look = {});
  ~Comm();

  const Topology& topology() const { return *members_.topology; }
  Fault& fault() { return *fault_; }

  // Place of an issued operation among this rank's collectives, which all ranks issue in one order:
  // a ticket for run(), and the tag that tells it from its neighbours on the links.
  struct Place {
    uint64_t ticket = 0;
    int tag = 0;
  };
  Place nextPlace();

  // Executes a collective; blocks until this rank's part is done.
  void run(const host::Collective& collective, const Place& place);
  // Executes an all-to-all with parts of any size, by rank.
  void exchange(
      const std::vector<Part>& sends,
      const std::vector<Part>& receives,
      ncclDataType_t type,
      const Place& place);

  Messages& messages() { return *messages_; }
  shm::Operators& operators() { return operators_; }

  // Starts the thread for completeLater(). Call before Messages::post() of what is completed later.
  // Raises if the thread cannot be started.
  void prepareLater() { waiters_.start(); }

  // Calls the message's `done` when it has ended, from a thread for that: Gloo tells of the end of
  // a message only to a thread that waits for it.
  void completeLater(std::shared_ptr<Request> request);

  // Makes the communicator of the ranks with this one's color, by key; null for a rank without one.
  // If all are on one host, it is the shared-memory library's `inside`, and there is no Comm.
  struct Child {
    std::shared_ptr<Comm> comm;
    ncclComm_t inside = nullptr;
  };
  Child split(int color, int key, const Place& place);

  // Returns the ranks that the oldest waiting collective misses, or those at fault.
  std::vector<int> absentRanks() const;

  // Returns a look into the store for what other ranks have written, for ranks that wait for
  // nothing and so see no broken connection: a failure, which then is one here as well, or that the
  // ranks are to be connected. One rank of a host looks, and rings if there is news.
  NcclApi::Probe probe();
  // Same as NcclApi::ring, among the ranks of this host.
  uint64_t ring(uint64_t times);

  // Ends the connections; after a failure only when the others can read the reason. What was sent
  // still arrives.
  void close();

 private:
  friend class Execution;

  explicit Comm(Members members);
  void connectLane(Connected connected, const std::function<void()>& look);
  void awaitLane();
  void runHere(const host::Collective& collective, const Place& place);
  // Raises the failure of the ranks of this host, or else the error of a call for them.
  void checkInside(ncclResult_t result) const;
  // Executes `body` in its turn, and turns failures of either library into the group's.
  void execute(const Place& place, const std::function<void()>& body);

  const Members members_;
  const std::shared_ptr<shm::Comm> inside_;
  const std::shared_ptr<Fault> fault_;
  std::shared_ptr<Link> lane_;  // to this rank's counterparts; null: it is on no lane
  std::shared_ptr<Messages> messages_;
  shm::TicketLock turns_;
  shm::Operators operators_;
  Scratch scratch_;  // used by the operation whose turn it is
  WorkerStream waiters_{"tcpg_gloo"};

  mutable std::mutex mutex_;
  int tags_ = 0;
  bool closed_ = false;
};

}  // namespace torchcomms_pg::gloo
