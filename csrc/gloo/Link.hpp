// Connections between some ranks of a group, and packets over the send and receive of torch's Gloo.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/Mutex.hpp"
#include "base/TorchCompat.hpp"
#include "gloo/GroupFailure.hpp"
#include "gloo/InterruptibleWait.hpp"
#include "host/Signature.hpp"

namespace torchcomms_pg::gloo {

// Gloo's connections between the ranks of a link, as a c10d::Backend, since torch ships no header
// of Gloo. Null for a single rank.
using Connections = c10::intrusive_ptr<c10d::Backend>;

// Raised if this rank has no address at which other ranks could reach it, for example since the
// interface that the user named does not exist.
struct NoAddress : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Connects `size` ranks, which meet in the store and all have to call this. Raises NoAddress, or
// Gloo's error, which does not prove that any rank is at fault.
using Connect =
    std::function<Connections(c10::intrusive_ptr<c10d::Store> store, int rank, int size)>;

// One side of what crosses a link: a collective's data, or a user's message.
struct Packet {
  Signature signature;  // call that the other side has to make as well
  bool sending = false;
  int peer = 0;  // the peer's number on the link
  int tag = 0;
  void* data = nullptr;
  size_t bytes = 0;
  // Tag of the data if both sides know its size, as in most collectives: the data can then be
  // received before the envelope. Differs between collectives. 0 if the receiver does not know the
  // size: the sender's post() then writes a tag into the envelope.
  int dataTag = 0;
  // whether the packet has an envelope; of a collective's packets to a peer, only the first has one
  bool announced = true;
  int userTag = 0;         // tag of a user's message; receiveEnvelope() sets it
  bool confirmed = false;  // see Message::confirmed

  at::Tensor envelope = {};
  c10::intrusive_ptr<c10d::Work> head = {};  // transfer of the envelope, or null
  c10::intrusive_ptr<c10d::Work> body = {};  // transfer of large data, or null
};

// Sends a packet as an envelope of fixed size, followed by large data under its own tag. The
// envelope names the call that the packet belongs to, and holds small data. The receiver thus
// notices that the ranks call different operations, before data is written to a wrong place. Gloo
// itself would end the process if a length differs from the expected length.
//
// Thread-safe. Once the group has failed, waiting threads are released, and every call raises the
// failure as host::NcclError. After the reason has been written, the connections are dropped, so
// that the other ranks notice and look for the reason.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Tag of the envelopes of users' messages, which contain the users' own tags.
  static constexpr int kMessageTag = 1;
  // Number of tags in a range, and the first tags of three ranges: envelopes of collectives, data
  // of messages, data of collectives.
  static constexpr int kTagLimit = 1 << 29;
  static constexpr int kCollectiveTags = kTagLimit;
  static constexpr int kDataTags = 2 * kTagLimit;
  static constexpr int kCollectiveDataTags = 3 * kTagLimit;

  // The parts that a link is made of.
  struct Setup {
    Connect connect;
    c10::intrusive_ptr<c10d::Store> store;  // the group's store
    std::string prefix;                     // prepended to the link's keys in the store
    std::shared_ptr<GroupFailure> groupFailure;
    std::vector<int> members;        // the link's ranks, as numbered in the group
    std::vector<std::string> names;  // the members' names in errors
    int rank;                        // index of this rank in `members`
  };
  static std::shared_ptr<Link> make(Setup setup);

  int rank() const { return setup_.rank; }
  int size() const { return static_cast<int>(setup_.members.size()); }

  // Connects the ranks within `timeout`; all of them have to call this. Meanwhile calls `look` a
  // few times a second, or checks for signals if `look` is empty. Raises the group's failure. If
  // `look` raises, fails the group and passes the exception on.
  void connect(std::chrono::milliseconds timeout, const std::function<void()>& look);
  // Connects the ranks in the calling thread, which may block for long. First opens a connection to
  // the group's store for this, and calls `tell` with it. An error fails the group.
  void connectDetached(const std::function<void(c10d::Store& group)>& tell);

  // Connects the ranks on request of this rank alone: the other ranks find the request in the store
  // within about a second. Returns when the ranks are connected. Raises the group's failure, for
  // example if a rank has left.
  Connections awaitConnections();
  bool connected() const;

  // Posts the packet to Gloo and returns it for complete(). Blocks only as awaitConnections() does,
  // or if the connection is broken, as raiseBroken() does.
  Packet post(Packet packet);

  // Waits until the packet has been sent or received. `late`: missingRanks() may report the peer
  // meanwhile.
  void complete(Packet& packet, bool late);

  // Receives the envelope of the next message from `packet.peer`, without its data. Returns the
  // error of the connection, or "" on success. Raises the group's failure, even if the peer has
  // just sent it.
  std::string receiveEnvelope(Packet& packet);
  // Compares the packet with its received envelope, and raises if they differ. Copies small data
  // out of the envelope, or starts to receive the data that follows.
  void accept(Packet& packet);
  // Finds out, within some seconds, why the connection with `peer` is broken. Fails the group with
  // this cause, and raises the group's failure. `what`: the connection's error.
  [[noreturn]] void raiseBroken(int peer, const std::string& what);

  // Starts to connect the ranks if another rank has requested that in the group's store, which is
  // `group`.
  void lookForOthers(c10d::Store& group);

  // Returns the peer for which complete() with `late` has waited longest, as a rank of the group.
  // Empty if no call waits.
  std::vector<int> missingRanks() const;

  // Notifies the peers that this rank leaves, and ends the connections. What this rank has sent
  // before still arrives. If the ranks are not connected, the notice is a key in the store.
  void close();

 private:
  // Tag and time limit of the reason that a rank sends to its peers before it drops the
  // connections, and a posted receive of it. The text is an encoded failure, or empty if the rank
  // just leaves.
  static constexpr int kReasonTag = kTagLimit;
  static constexpr std::chrono::milliseconds kReasonPatience{500};
  struct Reason {
    at::Tensor text;
    c10::intrusive_ptr<c10d::Work> arrival;
  };

  explicit Link(Setup setup) : setup_(std::move(setup)) {}
  void release();
  void expectReasons() REQUIRES(mutex_);
  void tellReason(const std::string& reason);
  bool failAsHeard(int peer);
  bool take(int peer, const Reason& reason);
  void learn();
  bool hasLeft(int peer) const;
  void connectThrough(c10::intrusive_ptr<c10d::Store> group);
  std::string nameOfRanks() const;
  host::NcclError unconnected(const std::string& why, std::vector<int> ranks) const;
  std::string key(const char* name) const { return setup_.prefix + "/" + name; }
  // Starts to connect the ranks. `tells`: asks the other ranks through the store to connect too.
  void startConnecting(bool tells);
  void checkOpen() const REQUIRES(mutex_);
  std::string wait(c10::intrusive_ptr<c10d::Work> work);
  void await(const c10::intrusive_ptr<c10d::Work>& work, int peer);
  std::string hand(Packet& packet);
  void seal(Packet& packet) REQUIRES(mutex_);
  void compare(const Packet& packet, const Signature& theirs);
  void disconnect();

  const Setup setup_;
  const std::shared_ptr<InterruptibleWait> watch_ = InterruptibleWait::hold();

  mutable Mutex mutex_;
  std::condition_variable changed_;
  Connections connections_ GUARDED_BY(mutex_);
  // True once a thread for connecting has been started.
  bool connecting_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
  // Number of the data tags that were assigned, modulo kTagLimit.
  int data_ GUARDED_BY(mutex_) = 0;
  std::list<c10::intrusive_ptr<c10d::Work>> awaited_ GUARDED_BY(mutex_);
  // Peers for which complete() waits with `late`, oldest first.
  std::list<int> late_ GUARDED_BY(mutex_);
  // By peer, until its reason has been received.
  std::map<int, Reason> reasons_ GUARDED_BY(mutex_);
  // Peers whose notice that they leave has been received.
  std::set<int> left_ GUARDED_BY(mutex_);
};

}  // namespace torchcomms_pg::gloo
