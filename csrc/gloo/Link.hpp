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
#include <string>
#include <utility>
#include <vector>

#include "base/TorchCompat.hpp"
#include "gloo/Fault.hpp"
#include "gloo/SignalWatch.hpp"
#include "host/Collective.hpp"

namespace torchcomms_pg::gloo {

// Gloo's connections between the ranks of a group; c10d::Backend, since torch ships no header of
// Gloo. Null for a rank alone.
using Connections = c10::intrusive_ptr<c10d::Backend>;

// Connects the ranks that meet in the store; collective over them.
using Connect =
    std::function<Connections(c10::intrusive_ptr<c10d::Store> store, int rank, int size)>;

// One side of a message under way.
struct PendingMessage {
  host::Signature signature;  // what the other side has to call as well
  bool sending = false;
  int peer = 0;  // by its number on the link
  int tag = 0;
  void* data = nullptr;
  size_t bytes = 0;
  // Of a collective, whose sizes both sides know: the tag of its data, so that it can be received
  // before the envelope has come. It differs between different collectives.
  int dataTag = 0;
  bool announced = true;   // has an envelope; not what follows another message of one collective
  int userTag = 0;         // of a message, and of an envelope that has come
  bool confirmed = false;  // of a message: see Message

  at::Tensor envelope = {};
  c10::intrusive_ptr<c10d::Work> head = {};  // of the envelope
  c10::intrusive_ptr<c10d::Work> body = {};  // of large data
};

// A message is an envelope of fixed size, which says what it belongs to and holds small data, and
// behind it large data under a tag of their own. So the receiver knows of ranks that call
// different operations before it takes a byte to the wrong place; Gloo itself would end the
// process at a length it does not expect.
//
// Thread-safe. Once the group has failed, whoever waits is released, and every call raises the
// failure as host::Failure; the connections are dropped, so that the other ranks notice, and find
// the reason in the store.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Of the envelopes of all messages of users, whose own tags are inside.
  static constexpr int kMessageTag = 1;
  // Tags of collectives, from 1, then of data: of messages, then of collectives.
  static constexpr int kTagLimit = 1 << 29;
  static constexpr int kCollectiveTags = kTagLimit;
  static constexpr int kDataTags = 2 * kTagLimit;
  static constexpr int kCollectiveDataTags = 3 * kTagLimit;

  // What a link is made of.
  struct Setup {
    Connect connect;
    c10::intrusive_ptr<c10d::Store> store;  // of the group
    std::string prefix;                     // of the link's keys in the store
    std::shared_ptr<Fault> fault;
    std::vector<int> members;        // ranks of the group
    std::vector<std::string> names;  // of the members, for errors
    int rank;                        // this one's place among them
  };
  static std::shared_ptr<Link> make(Setup setup);

  int rank() const { return setup_.rank; }
  int size() const { return static_cast<int>(setup_.members.size()); }

  // Connects the ranks, which all have to call this, within `timeout`. Calls `look`, which may
  // raise, a few times a second meanwhile (empty: only signals are looked for). Raises the group's
  // failure, or what `look` does, with which the group has failed then.
  void connect(std::chrono::milliseconds timeout, const std::function<void()>& look);
  // The same in a thread for it: through a connection to the group's store of its own, for which
  // `tell` is called first; what goes wrong fails the group.
  void connectApart(const std::function<void(c10d::Store& group)>& tell);

  // The same where only this rank may need it: has the others do so within about a second, which
  // they learn by their probes. Returns when they are connected, at once if they are; raises the
  // failure, for example of a rank that has left.
  void awaitConnections() { connections(); }
  bool connected() const;

  // Hands the message to Gloo; blocks only as awaitConnections() does.
  std::shared_ptr<PendingMessage> post(PendingMessage pending);

  // Returns when the message has been sent or received. `late`: the rank is missed meanwhile, see
  // absentRanks().
  void complete(PendingMessage& pending, bool late);

  // Of a message: the next one that `peer` sends, without its data. What is wrong with the
  // connection; empty: it has come. Raises the group's failure, also where the peer has told one.
  std::string receiveEnvelope(PendingMessage& pending);
  // Has the data of a message, whose envelope has come, received for `receive`.
  void accept(PendingMessage& pending, const PendingMessage& receive);
  [[noreturn]] void raiseBroken(int peer, const std::string& what);

  // Looks in the group's store, a connection to it of the calling thread's own, whether other ranks
  // want to be connected; then they are.
  void lookForOthers(c10d::Store& group);

  // The ranks of the group that the oldest waiting collective misses.
  std::vector<int> absentRanks() const;

  // Ends the connections. What was sent still arrives. Without connections it is told in the store
  // that this rank has left.
  void close();

 private:
  // Of what a rank tells the others over their connections before it drops them, and what it is.
  static constexpr int kReasonTag = kTagLimit;
  static constexpr std::chrono::milliseconds kReasonPatience{500};
  // For it in the store: a rank that is held up may lose its connections first.
  static constexpr std::chrono::milliseconds kWrittenPatience{2000};
  static constexpr std::chrono::seconds kReleasePatience{5};
  struct Reason {
    at::Tensor text;
    c10::intrusive_ptr<c10d::Work> arrival;
  };

  explicit Link(Setup setup) : setup_(std::move(setup)) {}
  void release();
  void expectReasons();
  void tellReason();
  bool failAsHeard(int peer);
  Connections connections();
  void connectThrough(const c10::intrusive_ptr<c10d::Store>& group);
  host::Failure unconnected(const std::string& why, std::vector<int> ranks) const;
  std::string key(const char* name) const { return setup_.prefix + "/" + name; }
  // `tells`: the other ranks may not know that they are to do so, too.
  void startConnecting(bool tells);
  void checkOpen() const;
  std::string wait(c10::intrusive_ptr<c10d::Work> work);
  void await(const c10::intrusive_ptr<c10d::Work>& work, int peer);
  std::string hand(PendingMessage& pending);
  void seal(PendingMessage& pending);
  void open(PendingMessage& pending);
  void compare(const PendingMessage& pending, const host::Signature& theirs);
  void tellLeft();
  void disconnect();

  const Setup setup_;
  const std::shared_ptr<SignalWatch> watch_ = SignalWatch::hold();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Connections connections_;
  bool connecting_ = false;  // in a thread of its own, now or before
  bool closed_ = false;
  int data_ = 0;
  std::list<c10::intrusive_ptr<c10d::Work>> awaited_;
  std::list<int> late_;
  std::map<int, Reason> reasons_;  // by peer, who has yet to tell one
};

}  // namespace torchcomms_pg::gloo
