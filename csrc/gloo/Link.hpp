// Connections between some ranks of a group, and messages over the send and receive of torch's
// Gloo.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/TorchCompat.hpp"
#include "gloo/Fault.hpp"
#include "gloo/SignalWatch.hpp"
#include "host/Collective.hpp"

namespace torchcomms_pg::gloo {

// Gloo's connections between the ranks of a group, as c10d::Backend, since torch ships no header of
// Gloo. Null for a rank alone.
using Connections = c10::intrusive_ptr<c10d::Backend>;

// This rank has no address at which others could reach it, as of an interface that is not there.
struct NoAddress : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Connects the ranks that meet in the store; collective over them. Raises NoAddress; or what Gloo
// does, which proves nothing against a rank.
using Connect =
    std::function<Connections(c10::intrusive_ptr<c10d::Store> store, int rank, int size)>;

// One side of a message under way.
struct PendingMessage {
  host::Signature signature;  // call that the other side has to make as well
  bool sending = false;
  int peer = 0;  // number on the link
  int tag = 0;
  void* data = nullptr;
  size_t bytes = 0;
  // Tag of the data of a collective, whose sizes both sides know, so that the data can be received
  // before the envelope has come. It differs between different collectives.
  int dataTag = 0;
  bool announced = true;   // has an envelope; false behind another message of one collective
  int userTag = 0;         // tag of a user's message, and of an envelope that has come
  bool confirmed = false;  // for a user's message: see Message

  at::Tensor envelope = {};
  c10::intrusive_ptr<c10d::Work> head = {};  // transfer of the envelope
  c10::intrusive_ptr<c10d::Work> body = {};  // transfer of large data
};

// Sends a message as an envelope of fixed size, which says what it belongs to and holds small data,
// followed by large data under a tag of their own. So the receiver notices ranks that call
// different operations before it takes a byte to the wrong place; Gloo itself would end the process
// at a length it does not expect.
//
// Thread-safe. Once the group has failed, waiting threads are released, and every call raises the
// failure as host::NcclError; the connections are dropped, so that the other ranks notice, and find
// the reason in the store.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Tag of the envelopes of all messages of users, whose own tags are inside.
  static constexpr int kMessageTag = 1;
  // Limits of the tags: of collectives, from 1; then of data: of messages, then of collectives.
  static constexpr int kTagLimit = 1 << 29;
  static constexpr int kCollectiveTags = kTagLimit;
  static constexpr int kDataTags = 2 * kTagLimit;
  static constexpr int kCollectiveDataTags = 3 * kTagLimit;

  // The parts that a link is made of.
  struct Setup {
    Connect connect;
    c10::intrusive_ptr<c10d::Store> store;  // the group's
    std::string prefix;                     // prepended to the link's keys in the store
    std::shared_ptr<Fault> fault;
    std::vector<int> members;        // ranks of the group
    std::vector<std::string> names;  // of the members, for errors
    int rank;                        // this rank's place among them
  };
  static std::shared_ptr<Link> make(Setup setup);

  int rank() const { return setup_.rank; }
  int size() const { return static_cast<int>(setup_.members.size()); }

  // Connects the ranks, which all have to call this, within `timeout`. Calls `look`, which may
  // raise, a few times a second meanwhile (empty: only signals are looked for). Raises the group's
  // failure, or what `look` raises, with which the group has failed then.
  void connect(std::chrono::milliseconds timeout, const std::function<void()>& look);
  // Same in a thread for it, through its own connection to the group's store, for which `tell` is
  // called first; an error fails the group.
  void connectApart(const std::function<void(c10d::Store& group)>& tell);

  // Connects the ranks when only this one may need it: the others learn of it by their probes and
  // follow within about a second. Returns when they are connected, at once if they are; raises the
  // failure, for example of a rank that has left.
  void awaitConnections() { connections(); }
  bool connected() const;

  // Hands the message to Gloo; blocks only as awaitConnections() does.
  std::shared_ptr<PendingMessage> post(PendingMessage pending);

  // Returns when the message has been sent or received. `late`: the peer counts as missed
  // meanwhile, see absentRanks().
  void complete(PendingMessage& pending, bool late);

  // Receives the envelope of the next message that `peer` sends, without its data. Returns the
  // error of the connection, or "". Raises the group's failure, also one that the peer has told.
  std::string receiveEnvelope(PendingMessage& pending);
  // Receives the data of a message, whose envelope has come, for `receive`.
  void accept(PendingMessage& pending, const PendingMessage& receive);
  [[noreturn]] void raiseBroken(int peer, const std::string& what);

  // Looks in the group's store, through the calling thread's own connection, whether other ranks
  // want to be connected; then they are.
  void lookForOthers(c10d::Store& group);

  // Returns the ranks of the group that the oldest waiting collective misses.
  std::vector<int> absentRanks() const;

  // Ends the connections, after it has told their ranks that this one leaves. What was sent still
  // arrives. Without connections this rank writes that in the store.
  void close();

 private:
  // Tag of the message that ends connecting.
  static constexpr int kConnectedTag = 0;
  // Tag and time limit of the reason that a rank tells the others over their connections before it
  // drops them, and the reason: of a failure, or empty if the rank just leaves.
  static constexpr int kReasonTag = kTagLimit;
  static constexpr std::chrono::milliseconds kReasonPatience{500};
  struct Reason {
    at::Tensor text;
    c10::intrusive_ptr<c10d::Work> arrival;
  };

  explicit Link(Setup setup) : setup_(std::move(setup)) {}
  void release();
  void expectReasons();
  void tellReason(const std::string& reason);
  bool failAsHeard(int peer);
  bool take(int peer, const Reason& reason);
  void learn();
  bool hasLeft(int peer) const;
  std::string nameOfLink(int peer) const;
  Connections connections();
  void connectThrough(const c10::intrusive_ptr<c10d::Store>& group);
  std::string nameOfRanks() const;
  host::NcclError unconnected(const std::string& why, std::vector<int> ranks) const;
  std::string key(const char* name) const { return setup_.prefix + "/" + name; }
  // Starts to connect the ranks. `tells`: the other ranks may not know that they are to do so, too.
  void startConnecting(bool tells);
  void checkOpen() const;
  std::string wait(c10::intrusive_ptr<c10d::Work> work);
  void await(const c10::intrusive_ptr<c10d::Work>& work, int peer);
  std::string hand(PendingMessage& pending);
  void seal(PendingMessage& pending);
  void open(PendingMessage& pending);
  void compare(const PendingMessage& pending, const host::Signature& theirs);
  void disconnect();

  const Setup setup_;
  const std::shared_ptr<SignalWatch> watch_ = SignalWatch::hold();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Connections connections_;
  bool connecting_ = false;  // true once a thread for that has been started
  bool closed_ = false;
  int data_ = 0;
  std::list<c10::intrusive_ptr<c10d::Work>> awaited_;
  std::list<int> late_;
  std::map<int, Reason> reasons_;  // by peer that has yet to tell one
  std::set<int> left_;             // peers that have told that they leave
};

}  // namespace torchcomms_pg::gloo
