// A group of ranks on several hosts: shared memory inside a host, Gloo between hosts.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/WorkerStream.hpp"
#include "gloo/GroupFailure.hpp"
#include "gloo/Link.hpp"
#include "gloo/Messages.hpp"
#include "gloo/Scratch.hpp"
#include "gloo/Topology.hpp"
#include "host/Signature.hpp"
#include "nccl/Library.hpp"
#include "shm/Comm.hpp"

namespace torchcomms_pg::gloo {

// Time when the ranks are connected. `now`: in Comm::make(), which then is collective.
// `whenNeeded`: when the first rank communicates, see Link::awaitConnections().
enum class Connected { now, whenNeeded };

// The parts that a communicator is made of.
struct Members {
  c10::intrusive_ptr<c10d::Store> store;  // for this communicator alone
  std::shared_ptr<const Topology> topology;
  // communicator of shm::library() with the ranks of this host, in order; owned
  ncclComm_t inside = nullptr;
  Connect connect;
  std::chrono::milliseconds timeout;  // limit for connecting the ranks
  // Returns how a rank's process has ended, such as "(pid 5) died", or "" if it may still run.
  std::function<std::string(int rank)> died;
};

// Data of an exchange for or from one rank.
struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};

// Gloo moves bytes; the shared-memory library does the arithmetic, with every type and reduction of
// NCCL. Data is reduced host by host in rank order, to the same bits on every rank. Execution.hpp
// describes the steps of each collective.
//
// Thread-safe. Operations raise host::NcclError with ranks as numbered in the group.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  // Makes a communicator. `look`: see Link::connect().
  static std::shared_ptr<Comm> make(
      Members members, Connected connected, const std::function<void()>& look = {});
  ~Comm();

  const Topology& topology() const { return *members_.topology; }
  GroupFailure& groupFailure() { return *groupFailure_; }

  // Place of an issued operation among this rank's collectives, which all ranks issue in one order:
  // a ticket for run(), and a tag that separates its messages on the links from its neighbours'.
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

  // Starts the thread of completeLater(). Call this before Messages::post() of a message that is
  // completed later. Raises if no thread can be started.
  void prepareLater() { waiters_.start(); }

  // Calls the message's `done` when it has ended, from a separate thread: Gloo reports the end of a
  // message only to a thread that waits for it.
  void completeLater(std::shared_ptr<Transfer> transfer);

  // Makes the communicator of the ranks with this rank's color, ordered by key; both members are
  // null without a color. If all are on one host, it is the shared-memory library's `inside`,
  // without a Comm.
  struct Child {
    std::shared_ptr<Comm> comm;
    ncclComm_t inside = nullptr;
  };
  Child split(int color, int key, const Place& place);

  // Returns the ranks missing at the oldest waiting collective, or after a failure those at fault.
  std::vector<int> missingRanks() const;

  // Returns a function that polls the store, for ranks that wait for nothing and so notice no
  // broken connection. It fails this rank with a failure that another has written, and connects the
  // ranks if another has asked for it. One rank of a host polls, and rings the others if there is
  // news.
  Probe probe();
  // Same as Library::ring, among the ranks of this host.
  uint64_t ring(uint64_t times);

  // Ends the connections; after a failure only when the other ranks can read the reason. What was
  // sent before still arrives.
  void close();

 private:
  friend class Execution;

  explicit Comm(Members members);
  void connectRail(Connected connected, const std::function<void()>& look);
  void awaitRail();
  void runHere(const host::Collective& collective, const Place& place);
  // Raises the failure of this host's ranks, or else the error of the call that returned `result`.
  void checkInside(ncclResult_t result) const;
  // Executes `body` in its turn. A failure of either library becomes the group's.
  void execute(const Place& place, const std::function<void()>& body);

  const Members members_;
  const std::shared_ptr<shm::Comm> inside_;
  const std::shared_ptr<GroupFailure> groupFailure_;
  // connections with this rank's counterparts; null if it is on no rail
  std::shared_ptr<Link> rail_;
  std::shared_ptr<Messages> messages_;
  shm::TicketLock turns_;
  Scratch scratch_;  // used by the operation whose turn it is
  WorkerStream waiters_{"tcpg_gloo"};

  mutable std::mutex mutex_;
  int tags_ = 0;
  bool closed_ = false;
};

}  // namespace torchcomms_pg::gloo
