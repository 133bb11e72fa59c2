// Messages between the ranks of one group, over the send and receive of torch's Gloo.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/TorchCompat.hpp"
#include "shm/Collective.hpp"
#include "shm/Failure.hpp"

namespace torchcomms_pg::gloo {

// Gloo's connections between the ranks of a group; c10d::Backend, since torch ships no header of
// Gloo. Null for a rank alone.
using Connections = c10::intrusive_ptr<c10d::Backend>;

// Connects the ranks that meet in the store; collective over them.
using Connect =
    std::function<Connections(c10::intrusive_ptr<c10d::Store> store, int rank, int size)>;

// One side of a message under way.
struct Parcel {
  shm::Signature signature;  // what the other side has to call as well
  bool sending = false;
  int peer = 0;
  int tag = 0;
  void* data = nullptr;
  size_t bytes = 0;
  at::Tensor envelope;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};

// A message is an envelope of fixed size, which says what it belongs to and holds small data, and
// behind it large data under a tag of their own. So the receiver knows of ranks that call
// different operations before it takes a byte to the wrong place; Gloo itself would end the
// process at a length it does not expect.
//
// Thread-safe. Once it has failed, whoever waits is released, and every call raises the first
// failure as shm::Failure; the connections are dropped, so that the other ranks notice, and find
// the reason in the store.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Tags of users are below it; above are those of collectives and of data.
  static constexpr int kTagLimit = 1 << 29;

  Link(Connect connect, c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Connects the ranks, which all have to call this. Raises what Connect does.
  void connect() { connectThrough(store_); }

  // The same where only this rank may need it: has the others do so within about a second, which
  // they learn by their probes. Returns when they are connected, at once if they are; raises the
  // failure, for example of a rank that has left.
  void awaitConnections() { connections(); }
  bool connected() const;

  // The tag of the next collective: ranks issue them in one order.
  int nextCollectiveTag();

  // Hands the message to Gloo; blocks only as awaitConnections() does. A message to this rank
  // itself is copied.
  std::shared_ptr<Parcel> post(Parcel parcel);

  // Returns the other side when the message has been sent or received. `late`: the rank is
  // missed meanwhile, see absentRanks().
  int complete(Parcel& parcel, bool late);

  void checkUsable() const;
  std::optional<shm::Failure> failure() const;

  // From any thread, without blocking. The first failure stands.
  void fail(ncclResult_t result, const std::string& reason, const std::vector<int>& ranks);

  // What looks in the store for what other ranks have written there, for ranks that wait for
  // nothing, and so see no broken connection: a failure, which then is one here as well, or that
  // the ranks are to be connected. May block; for one thread.
  std::function<void()> probe();

  // The ranks that the oldest waiting collective misses, or those at fault.
  std::vector<int> absentRanks() const;

  // Ends the connections. What was sent still arrives. After a failure only when the others can
  // read the reason, for which it waits at most kTellPatience: else they would know of a broken
  // connection alone. Without connections it is told in the store that this rank has left.
  void close();

 private:
  static constexpr std::chrono::seconds kTellPatience{5};

  // What a rank has sent to itself.
  struct Kept {
    shm::Signature signature;
    std::vector<char> data;
  };

  Connections connections();
  void connectThrough(const c10::intrusive_ptr<c10d::Store>& store);
  void startConnecting();
  void lookForOthers(c10d::Store& store);
  void await(const c10::intrusive_ptr<c10d::Work>& work, int peer);
  void receive(Parcel& parcel);
  void receiveOwn(Parcel& parcel);
  void compare(const Parcel& parcel, const shm::Signature& theirs);
  [[noreturn]] void raiseBroken(int peer, const std::string& what);
  void tellOthers();
  void tellLeft();
  void disconnect();
  // Fails with the reason that another rank has written; false: nobody has, or the store is gone.
  bool failAsTold(c10d::Store& store);

  const Connect connect_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Connections connections_;
  bool connecting_ = false;  // in a thread of its own, now or before
  bool closed_ = false;
  int collectives_ = 0;
  int data_ = 0;
  std::list<c10::intrusive_ptr<c10d::Work>> awaited_;
  std::list<int> late_;
  std::map<int, std::deque<Kept>> toMyself_;
  std::optional<shm::Failure> failure_;
  bool told_ = false;  // or given up
};

}  // namespace torchcomms_pg::gloo
