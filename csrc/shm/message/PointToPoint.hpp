// Sends and receives of one communicator.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "shm/message/MessageEngine.hpp"
#include "shm/message/Transfer.hpp"
#include "shm/segment/Wait.hpp"

namespace torchcomms_pg::shm {

class Comm;

// Makes progress for all transfers of the communicator in every thread that waits. So no transfer
// waits for another one, except that messages of one pair and tag keep their order and that
// messages to one rank go through its channel one by one.
//
// A send has ended once its content has been copied. Functions may be called from any thread.
class PointToPoint {
 public:
  explicit PointToPoint(Comm& comm) : comm_(comm) {}

  // Fixes the place of a transfer without `done` in the order of its peer and tag.
  // Does not touch the buffer and does not block. Throws NcclError after shutdown.
  void add(const std::shared_ptr<Transfer>& transfer);

  // Blocks until all of the given transfers, which have been added, have ended.
  // When it throws NcclError, no buffer is touched any more.
  void run(std::span<const std::shared_ptr<Transfer>> transfers);

  // Adds a transfer that proceeds by itself. Throws NcclError, and then never calls `done`; or
  // calls it once, whatever becomes of the communicator: from this call, if a small message can be
  // moved at once, or later from the thread that moves its last byte. That is a thread that waits
  // here, or the server, the communicator's own thread, if none waits. A small transfer that is
  // deferred does not wake the server, once the peer has all that it needs of this rank.
  void runIndependently(const std::shared_ptr<Transfer>& transfer);

  // Blocks and moves messages until `ended` returns true, which the `done` of some transfer brings
  // about. Returns earlier if the communicator has failed or a signal interrupts the thread.
  void moveUntil(FunctionRef<bool()> ended);

  // Has the server move the transfers that were deferred.
  void serveDeferred();

  // Takes back a receive that was passed to runIndependently(), whose `done` is then never called.
  // Returns false if the receive has its message, or has failed.
  bool cancel(const std::shared_ptr<Transfer>& receive);

  // Returns the ranks that the oldest unfinished transfer waits for.
  std::vector<int> absentRanks();

  // Fails unfinished transfers: with the communicator's failure if it has one, or else with `why`.
  // Returns once `done` has been called for all, or after 2 s: a stuck callback must not hang the
  // thread that destroys the communicator. The callbacks behind it then come later.
  void shutdown(const std::string& why);

 private:
  using Transfers = std::span<const std::shared_ptr<Transfer>>;

  // Called with mutex_ held.
  MessageEngine& engine();
  bool handleEnded();
  void startServer();
  bool serverMoves() const { return movers_ == 0 && served_ > 0; }
  void serve(Transfer& transfer);
  [[noreturn]] void throwClosed() const;

  // Called without mutex_.
  std::unique_lock<std::mutex> lock();
  void ring() const;
  template <class Satisfied>
  bool progress(const Satisfied& satisfied);
  template <class Satisfied, class Needed>
  void move(const Satisfied& satisfied, const Needed& needed);
  bool needs(const Transfer& transfer, int rank) const;
  template <class Involved>
  bool stillNeeds(int rank, const Involved& involved);
  void close(const std::shared_ptr<const NcclError>& why);
  void fail(const std::shared_ptr<const NcclError>& problem);
  void serve();
  void callBackAll();
  void callBack(const Transfer& transfer);
  bool independentNeeds(int rank);

  Comm& comm_;
  std::atomic<int> contenders_{0};   // threads that are blocked on mutex_
  std::atomic<bool> closed_{false};  // changes under mutex_

  std::mutex mutex_;  // guards the members below; held while content is copied
  std::unique_ptr<MessageEngine> engine_;
  std::shared_ptr<const NcclError> closedBy_;

  // Transfers with `done`, which the thread that takes one off these lists calls; and the state of
  // the server thread. Moving a transfer between the lists allocates nothing.
  TransferList independent_;  // not ended
  TransferList completed_;    // `done` is due
  std::condition_variable work_;
  std::condition_variable quiet_;
  int movers_ = 0;  // number of threads that wait and move messages, without the server
  size_t served_ =
      0;  // number of independent transfers that the server moves if no other thread does
  bool serving_ = false;
  int callingBack_ = 0;  // number of threads in `done`
  std::thread::id server_;
};

}  // namespace torchcomms_pg::shm
