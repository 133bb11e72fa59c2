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

// Every waiting thread moves all transfers of the communicator. So no transfer waits for another
// one, except that messages of one pair and tag keep their order, and that messages to one rank
// share its channel one by one.
//
// A send has ended once its content has been copied. Thread-safe.
class PointToPoint {
 public:
  explicit PointToPoint(Comm& comm) : comm_(comm) {}

  // Fixes the place of a transfer without `done` in the order of its peer and tag. Does not touch
  // the buffer, and does not block. Throws NcclError after shutdown.
  void add(const std::shared_ptr<Transfer>& transfer);

  // Blocks until all of these transfers, which add() has added, have ended. If it throws NcclError,
  // no buffer is touched any more.
  void run(std::span<const std::shared_ptr<Transfer>> transfers);

  // Starts an asynchronous transfer. If it throws NcclError, `done` is never called. Otherwise
  // `done` is called exactly once, even if the communicator fails: during this call if a small
  // message can be moved at once, else in the thread that moves its end. That is a thread that
  // waits for messages or, if none does, the server, a thread of the communicator. A small deferred
  // transfer that has given its peer all that it needs does not wake the server. Nor does a small
  // deferred receive, as long as the messages of all such receives fit into a channel.
  void runIndependently(const std::shared_ptr<Transfer>& transfer);

  // Blocks and moves messages until `ended` returns true, which the `done` of some transfer brings
  // about. Returns earlier if the communicator has failed or a signal interrupts the thread.
  void moveUntil(FunctionRef<bool()> ended);

  // Makes the server move the deferred transfers.
  void serveDeferred();

  // Withdraws a receive that was passed to runIndependently(), whose `done` is then never called.
  // Returns false if the receive has its message, or has failed.
  bool cancel(const std::shared_ptr<Transfer>& receive);

  // Returns the ranks that the oldest unfinished transfer waits for.
  std::vector<int> missingRanks();

  // Fails unfinished transfers with the communicator's failure, or with `why` if it has none. No
  // buffer is touched any more when it returns; each `done` is called soon, by another thread.
  void giveUp(const NcclError& why);

  // Does the same as giveUp(). Returns once `done` has been called for all, or after 2 s: a stuck
  // callback must not hang the thread that destroys the communicator. Callbacks behind a stuck one
  // are called later.
  void shutdown(const std::string& why);

 private:
  using Transfers = std::span<const std::shared_ptr<Transfer>>;

  // Called with mutex_ held.
  MessageEngine& engine();
  bool handleEnded();
  void startServer();
  bool serverMoves() const { return movers_ == 0 && served_ > 0; }
  bool mayWait(Transfer& transfer);
  void serve(Transfer& transfer);
  void forget(Transfer& transfer);
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

  // Asynchronous transfers; moving one between the lists allocates nothing. The thread that removes
  // one from `completed_` calls its `done`.
  TransferList independent_;  // not ended
  TransferList completed_;    // whose `done` is due
  std::condition_variable work_;
  std::condition_variable quiet_;
  int movers_ = 0;     // number of threads that wait and move messages, without the server
  size_t served_ = 0;  // number of transfers that the server moves if no other thread does
  size_t room_ = 0;    // sum of Transfer::room
  bool serving_ = false;
  int callingBack_ = 0;  // number of threads that call a `done`
  std::thread::id server_;
};

}  // namespace torchcomms_pg::shm
