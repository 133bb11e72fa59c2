// Sends and receives of one rank in one communicator.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/Mutex.hpp"
#include "shm/message/MessageEngine.hpp"
#include "shm/message/Transfer.hpp"
#include "shm/segment/Wait.hpp"

namespace torchcomms_pg::shm {

class Comm;

// Every waiting thread moves all transfers of this rank. So no transfer waits for another, with two
// exceptions: messages of one pair and tag keep their order, and messages to one rank go through
// the channel to that rank one by one.
//
// A send has ended once its content has been copied, a confirmed send (Message::confirmed) once the
// message has been received. Thread-safe.
class PointToPoint {
 public:
  explicit PointToPoint(Comm& comm) : comm_(comm) {}

  // Fixes the place of a transfer without `done` in the order of its peer and tag. Does not touch
  // the buffer, and does not block. Throws NcclError after a failure or shutdown().
  void add(const std::shared_ptr<Transfer>& transfer);

  // Blocks until all of these transfers have ended; add() must have added them. If it throws
  // NcclError, no thread touches their buffers any more.
  void run(std::span<const std::shared_ptr<Transfer>> transfers);

  // Starts an asynchronous transfer, with `done`. If this throws NcclError, `done` is never called.
  // Otherwise `done` is called exactly once, even if the communicator fails, unless cancel()
  // returns true. This call moves a small message itself if it can, and calls `done`. Otherwise a
  // thread that waits for messages moves the transfer and calls `done`. If no thread waits, the
  // server does, a thread of the communicator. Two kinds of small deferred transfers do not wake
  // the server: a send whose content is in the channel, and an unconfirmed receive while a channel
  // has room for the messages of all such receives.
  void runIndependently(const std::shared_ptr<Transfer>& transfer);

  // Blocks and moves messages until `ended` returns true; the `done` of some transfer must make it
  // true. Returns earlier if the communicator has failed or a signal interrupts the thread.
  void moveUntil(FunctionRef<bool()> ended);

  // Makes the server move the transfers that did not wake it.
  void serveDeferred();

  // Withdraws a receive of runIndependently(), whose `done` is then never called. Returns false if
  // the receive has its message, or has failed.
  bool cancel(const std::shared_ptr<Transfer>& receive);

  // Returns the ranks that the oldest unfinished transfer waits for.
  std::vector<int> missingRanks();

  // Fails unfinished transfers with the communicator's failure, or with `why` if the communicator
  // has not failed. When this returns, no thread touches a buffer any more; another thread will
  // soon call each `done`.
  void giveUp(const NcclError& why);

  // Does what giveUp() does, and waits until every `done` has returned, but at most 2 s: a stuck
  // callback must not hang the thread that destroys the communicator. Callbacks behind a stuck one
  // are called later. Does not wait if the server is the caller.
  void shutdown(const std::string& why);

 private:
  using Transfers = std::span<const std::shared_ptr<Transfer>>;

  MessageEngine& engine() REQUIRES(mutex_);
  bool handleEnded() REQUIRES(mutex_);
  void startServer() REQUIRES(mutex_);
  bool serverMoves() const REQUIRES(mutex_) { return movers_ == 0 && served_ > 0; }
  bool mayWait(Transfer& transfer) REQUIRES(mutex_);
  void serve(Transfer& transfer) REQUIRES(mutex_);
  void forget(Transfer& transfer) REQUIRES(mutex_);
  void checkOpen() const REQUIRES(mutex_) {
    if (closed_) throw *closedBy_;
  }

  UniqueLock lock() ACQUIRE(mutex_);
  void ring() const;
  template <class Satisfied>
  bool progress(const Satisfied& satisfied) EXCLUDES(mutex_);
  template <class Satisfied, class Needed>
  void move(const Satisfied& satisfied, const Needed& needed) EXCLUDES(mutex_);
  bool needs(const Transfer& transfer, int rank) const;
  template <class Involved>
  bool stillNeeds(int rank, const Involved& involved) EXCLUDES(mutex_);
  void close(const std::shared_ptr<const NcclError>& why) EXCLUDES(mutex_);
  void fail(const std::shared_ptr<const NcclError>& problem) EXCLUDES(mutex_);
  void serve() EXCLUDES(mutex_);
  void callBackAll() EXCLUDES(mutex_);
  bool independentNeeds(int rank) EXCLUDES(mutex_);

  Comm& comm_;
  std::atomic<int> contenders_{0};   // number of threads that wait for mutex_
  std::atomic<bool> closed_{false};  // set while mutex_ is held

  Mutex mutex_;  // held while content is copied
  std::unique_ptr<MessageEngine> engine_ GUARDED_BY(mutex_);
  std::shared_ptr<const NcclError> closedBy_ GUARDED_BY(mutex_);

  // Asynchronous transfers. Moving a transfer between the lists allocates nothing. The thread that
  // removes a transfer from `completed_` calls its `done`.
  TransferList independent_ GUARDED_BY(mutex_);  // not ended
  TransferList completed_ GUARDED_BY(mutex_);    // ended, but `done` has not been called
  std::condition_variable work_;
  std::condition_variable quiet_;
  // Number of threads that wait and move messages, except the server.
  int movers_ GUARDED_BY(mutex_) = 0;
  // Number of transfers that the server moves if no other thread does.
  size_t served_ GUARDED_BY(mutex_) = 0;
  size_t room_ GUARDED_BY(mutex_) = 0;  // sum of Transfer::room, in bytes
  bool serving_ GUARDED_BY(mutex_) = false;
  int callingBack_ GUARDED_BY(mutex_) = 0;  // number of threads that call a `done`
  std::thread::id server_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg::shm
