// A group of ranks over Gloo: what each of NCCL's operations sends to whom.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device/WorkerStream.hpp"
#include "gloo/Link.hpp"
#include "nccl/NcclApi.hpp"
#include "shm/Collective.hpp"

namespace torchcomms_pg::gloo {

// When the ranks are connected: by the constructor, which then is collective and raises what
// Connect does, or by the first rank that communicates, see Link::awaitConnections().
enum class Connected { now, whenNeeded };

// Gloo moves bytes, and the arithmetic is that of the shared-memory library: every type and
// reduction of NCCL, reduced in rank order, to the same bits on every rank. Every message goes
// straight from its sender to its receiver, since Gloo's ranks are few and its latency is long.
//
// Thread-safe. Operations raise shm::Failure.
class Comm : public std::enable_shared_from_this<Comm> {
 public:
  Comm(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      Connect connect,
      Connected connected);

  Link& link() { return *link_; }

  // Blocks until this rank's part is done. `tag` by Link::nextCollectiveTag().
  void run(const shm::Collective& collective, int tag);

  // Runs `body`, which may block, and raises what it raises. Gloo's waits look for no signals:
  // where handlers of signals run in the calling thread, another thread runs the body, and the
  // caller looks for signals. One whose handler raises fails the group, which ends the body.
  void runWatched(const std::function<void()>& body);

  std::shared_ptr<Parcel> post(bool sending, const Message& message, int tag);

  // Before post() of what is completed later. Raises where the thread that it takes cannot be
  // started, or the ranks cannot be connected.
  void prepareLater();

  // Calls the message's `done` when it has ended, from a thread of its own: Gloo can tell of the
  // end of a message only to somebody who waits for it.
  void completeLater(std::shared_ptr<Parcel> parcel, const Message& message);

  // Null for a rank without a color.
  std::shared_ptr<Comm> split(int color, int key, int tag);

  ncclRedOp_t createOperator(const shm::Operator& op);
  void destroyOperator(ncclRedOp_t op);
  shm::Operator resolveOperator(ncclRedOp_t op) const;

 private:
  // One step of a collective: all its messages are under way together.
  class Step;

  void allReduce(const shm::Collective& c, const void* input, int tag);
  void reduceTo(
      const shm::Collective& c, void* output, std::vector<const void*> inputs, size_t count);

  const c10::intrusive_ptr<c10d::Store> store_;
  const Connect connect_;
  const std::shared_ptr<Link> link_;
  WorkerStream waiters_{"tcpg_gloo"};
  WorkerStream watched_{"tcpg_gloo"};

  mutable std::mutex mutex_;
  int lastOperator_ = ncclNumOps;
  std::map<int, shm::Operator> operators_;
};

}  // namespace torchcomms_pg::gloo
