// Rendezvous of the ranks of a new communicator through the group's store.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/CommError.hpp"
#include "comm/Peer.hpp"
#include "connect/Rendezvous.hpp"

namespace torchcomms_pg {

// First byte of a value in the store: the requested value follows, ...
inline constexpr char kId = '=';
// ... or the reason why there will be no group, after the ranks at fault and '|', ...
inline constexpr char kRefusal = '!';
// ... or the reason why these ranks cannot share memory, ...
inline constexpr char kApart = '~';
// ... or nothing: a rank gave up waiting, and those that still wait meet in the next round.
inline constexpr char kGivenUp = '-';
// ... or two ranks, '|' and any of the values above: these have met for a message, and the others
// meet in the next round.
inline constexpr char kPair = '+';

// Raises CommError: the group could not be set up for `why`; `ranks` are at fault.
[[noreturn]] void failInit(
    const std::string& group, const std::string& why, std::vector<int> ranks = {});

// Returns the text of `error`, without the group and without torch's stack.
std::string reasonOf(const std::string& group, const std::exception& error);

// Writes "rank 2 <what> 'a'; ranks 0, 1 <what> 'b'" where the ranks say different things, else "".
std::string differences(const std::vector<std::string>& said, const std::string& what);

// One rank's part in the rendezvous; used by one thread.
//
// One store and name may serve one group after another, also of other ranks, and some may fail: the
// ranks meet in rounds, each under keys of its own. The first rank to decide on a round decides for
// all: rank 0 once all have come, a rank that gives up waiting, one that cannot join, or the lower
// one of two that want to exchange a message, when it has waited for the others. A rank enters the
// first round that is not over for it, so its second try meets the first of a late rank, and
// nothing that was said in an earlier round is taken for the new one. Of a round in which all have
// met nothing stays in the store but its number.
class StoreRendezvous {
 public:
  explicit StoreRendezvous(const RendezvousInfo& info);

  Met met() const { return {prefix_, peers_, pair_}; }
  const std::vector<Peer>& peers() const { return peers_; }

  // Calls `body`. Where it raises, tells the reason to all ranks that still wait, unless each finds
  // it out by itself, as where the store is gone.
  template <class Body>
  auto run(const Body& body) {
    try {
      return reachingStore(body);
    } catch (const std::exception& error) {
      if (!known_) {
        const auto [why, ranks] = blame(error);
        tell(ranks, why);
      }
      throw;
    }
  }

  // Returns the reason that the other ranks get for `error`, and the ranks at fault.
  std::pair<std::string, std::vector<int>> blame(const std::exception& error) const;

  using Judge = std::function<std::string(const std::vector<std::string>&)>;

  // Collects on rank 0 what every rank says of itself, and where it is, which all know afterwards.
  // All return what `judge` makes of it on rank 0: kId or kApart, and a text. All raise the text of
  // a kRefusal. Of a pair, `judgePair` does the same on the lower rank.
  std::string exchange(const std::string& mine, const Judge& judge, const Judge& judgePair);

  // Returns when all ranks have joined the library's communicator.
  void awaitJoined(const NcclApi& api, ncclComm_t comm);

  // Raises the reason, if another rank has given one, why it cannot join.
  void checkRefused();

  // Raises if a rank has died, or cannot join, or this one is to stop. Each rank looks after the
  // processes of its own host that it knows, and tells the other hosts.
  void look();

 private:
  void enter(int64_t round);

  // Returns whether the round is decided, and this rank need not learn how.
  bool over();

  // Takes part in one round; returns what it came to.
  std::string meet(const std::string& mine, const Judge& judge);

  // Decides the round for this rank and the one that it wants, if that wants this one, and this is
  // the lower one. Empty: not so, or not yet.
  std::string meetPair();

  // Deletes the round, if this is the last rank to have read the answer.
  void forget();

  // Returns the answer to the round: `answer`, unless another rank was first.
  std::string decide(const std::string& answer);

  // Calls `body`. Raises CommError where the store is gone.
  template <class Body>
  auto reachingStore(const Body& body) {
    try {
      return body();
    } catch (const c10::DistNetworkError& error) {
      raiseStoreGone(error);
    } catch (const c10::DistStoreError& error) {
      raiseStoreGone(error);
    }
  }

  // Raises a death that has ended the store with its process, or else that the store is gone.
  [[noreturn]] void raiseStoreGone(const c10::Error& error);

  // Returns a rank of this host whose process has ended; -1: each that is known is alive.
  int deadPeer() const;

  [[noreturn]] void raiseDied(int peer);

  std::string rankKey(int rank) const { return "rank/" + std::to_string(rank); }

  void set(const std::string& key, const std::string& value);

  std::string get(const std::string& key);

  void tell(const std::vector<int>& ranks, const std::string& why) noexcept;

  [[noreturn]] void raiseRefused(const std::string& text);

  // Returns what rank `peer` has said, after the lines about its place and version, and about the
  // rank that it wants, -1 if all.
  std::string hear(int peer, const std::string& text);

  // Describes how the versions of this package differ; empty: they do not.
  std::string differentVersions() const;

  [[noreturn]] void tellAgain(const std::string& refusal);

  // Returns the value of the key, or the answer if that comes first.
  std::string await(const std::string& key);

  // Builds the failure at the deadline; `joining`: ranks that are known but have not joined.
  Failure lateRanks(std::vector<int> joining = {});

  const RendezvousInfo& info_;
  const Peer self_ = Peer::self();
  c10d::Store& store_;
  // Longest time between two requests to the store of a rank that has waited for long.
  const std::chrono::microseconds turn_;
  const Clock::time_point deadline_;
  const std::string home_;  // prefix of the keys of all rounds
  std::string mine_;        // what this rank says of itself
  Judge judgePair_;
  std::vector<int> pair_;
  int64_t met_ = 0;  // last round in which all have come; rank 0 counts
  int64_t round_ = 0;
  std::string prefix_;                 // that of the round's keys
  std::vector<Peer> peers_;            // by rank, as far as they are known
  std::vector<bool> heard_;            // true: the peer is known from this rendezvous
  std::vector<bool> seen_;             // true: the peer came in an earlier round of this rendezvous
  std::vector<std::string> versions_;  // versions of this package, by rank; on rank 0 only
  bool said_ = false;                  // true: this rank has introduced itself
  bool known_ = false;                 // true: the other ranks know of the failure, or will
};

}  // namespace torchcomms_pg
