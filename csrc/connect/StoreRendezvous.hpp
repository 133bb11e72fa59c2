// Rendezvous of the ranks of a new communicator through the group's store.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/CommError.hpp"
#include "comm/Peer.hpp"
#include "connect/Rendezvous.hpp"
#include "host/NcclError.hpp"

namespace torchcomms_pg {

// First byte of a value in the store, which says what follows. kId: the requested value, ...
inline constexpr char kId = '=';
// ... kRefusal: the error why no group can be made, see refusal(), ...
inline constexpr char kRefusal = '!';
// ... kApart: the reason why these ranks cannot share memory, ...
inline constexpr char kApart = '~';
// ... kGivenUp: nothing; a rank gave up waiting, and the ranks that still wait meet in the next
// round, ...
inline constexpr char kGivenUp = '-';
// ... kPair: two ranks, as in "2 5|", and a kId or kRefusal; the two have met for a message, and
// the other ranks meet in the next round.
inline constexpr char kPair = '+';

// Returns the value that refuses a group, for the fault of `ranks`.
inline std::string refusal(const std::string& why, std::vector<int> ranks = {}) {
  return kRefusal + host::encode({ncclRemoteError, why, std::move(ranks)});
}

// Raises CommError, saying that the group could not be set up for the reason `why`, with the ranks
// at fault.
[[noreturn]] void failInit(
    const std::string& group, const std::string& why, std::vector<int> ranks = {});

// Returns the text of `error` without the group's name and torch's stack trace.
std::string reasonOf(const std::string& group, const std::exception& error);

// Returns "rank 2 <what> 'a'; ranks 0, 1 <what> 'b'" if the ranks' texts differ, else "". `pair`:
// the two ranks whose texts they are; empty for all ranks.
std::string differences(
    const std::vector<std::string>& said,
    const std::string& what,
    const std::vector<int>& pair = {});

// One rank's part in the rendezvous; used by one thread.
//
// The same store and name may serve several groups in turn, also of other ranks, and some of them
// may fail. So the ranks meet in rounds, each with separate keys. The first rank that decides a
// round decides it for all: rank 0 when all ranks have arrived, a rank that gives up waiting, a
// rank that cannot join, or, of two ranks that want to exchange a message, the lower one after it
// has waited for the others. A rank enters the first round that is not over for it. So its second
// try meets the first try of a late rank, and no message of an earlier round counts in a new one.
// Of a round in which all ranks met, only the number stays in the store.
class StoreRendezvous {
 public:
  explicit StoreRendezvous(const RendezvousInfo& info);

  Met met() const { return {prefix_, peers_, pair_}; }
  const std::vector<Peer>& peers() const { return peers_; }

  // Calls `body`. If it raises, passes the reason to all ranks that still wait, unless each notices
  // the cause itself, such as a store that is gone.
  template <class Body>
  auto run(const Body& body) {
    try {
      auto result = reachingStore(body);
      if (info_.rank == 0 && allMet_) {
        forget();
      }
      return result;
    } catch (const std::exception& error) {
      if (!known_) {
        tell(blame(error));
      }
      throw;
    }
  }

  // Returns what the other ranks get of `error`.
  host::NcclError blame(const std::exception& error) const;

  using Judge = std::function<std::string(const std::vector<std::string>&)>;

  // Collects on rank 0 each rank's message `mine`, process and host; afterwards all ranks know the
  // processes and hosts. All ranks return the result of rank 0's `judge` for the messages: kId or
  // kApart, and a text. All raise the text of a kRefusal. For a pair, the lower rank's `judgePair`
  // takes the place of `judge`.
  std::string exchange(const std::string& mine, const Judge& judge, const Judge& judgePair);

  // Returns when all ranks have joined the library's communicator.
  void awaitJoined(const Library& library, ncclComm_t comm);

  // Raises the reason of another rank that cannot join, if it has given one.
  void checkRefused();

  // Raises if a rank has died or cannot join, or if this rank must stop. Each rank checks the
  // processes of its host that it knows, and notifies the ranks of other hosts.
  void look();

 private:
  void enter(int64_t round);

  // Returns whether the round is decided and this rank need not read the answer.
  bool over();

  // Takes part in one round and returns its answer.
  std::string meet(const std::string& mine, const Judge& judge);

  // Decides the round for this rank and its `peer`, if the peer also wants this rank and this rank
  // is the lower one. Returns an empty text if not, or not yet.
  std::string meetPair();

  // Counts this rank, which has read the answer, and deletes the round's keys if it is the last.
  // Rank 0, which is often on the store's host, counts itself when it has joined the others, and so
  // is mostly the last.
  void forget();

  // Decides the round with `answer`, unless another rank was first. Returns the round's answer.
  std::string decide(const std::string& answer);

  // Calls `body`. Raises CommError if the store is gone.
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

  // Raises an error that names the dead rank whose process served the store, or else says that the
  // store is gone.
  [[noreturn]] void raiseStoreGone(const c10::Error& error);

  // Returns a rank of this host whose process has ended, or -1 if all known ones are alive.
  int deadPeer() const;

  [[noreturn]] void raiseDied(int peer);

  std::string rankKey(int rank) const { return "rank/" + std::to_string(rank); }

  void set(const std::string& key, const std::string& value);

  // Returns the value of a key of the round, or null if it does not exist.
  std::optional<std::string> value(const std::string& key);

  void tell(const host::NcclError& error) noexcept;

  [[noreturn]] void raiseRefused(const std::string& text);

  // Stores process and version of rank `peer` from its message `text`, and returns what follows the
  // message's second line, which names the rank that `peer` wants.
  std::string hear(int peer, const std::string& text);

  // Describes how the ranks' versions of this package differ; empty if they do not.
  std::string differentVersions() const;

  [[noreturn]] void tellAgain(const std::string& refusal);

  // Returns the value of the key, or the answer if that is stored first.
  std::string await(const std::string& key);

  // Builds the failure at the deadline. `joining` are ranks that are known but have not joined.
  Failure lateRanks(std::vector<int> joining = {});

  const RendezvousInfo& info_;
  const Peer self_ = Peer::self();
  c10d::Store& store_;
  const int64_t ranks_;  // number that poll the store at the same time, in all parts of a group
  const Clock::time_point deadline_;
  const std::string home_;  // prefix of the keys of all rounds
  std::string mine_;        // this rank's message
  Judge judgePair_;
  std::vector<int> pair_;
  int64_t met_ = 0;  // last round in which all ranks met, as rank 0 counts them
  int64_t round_ = 0;
  std::string prefix_;                 // prefix of the round's keys
  std::vector<Peer> peers_;            // by rank, as far as known
  std::vector<bool> heard_;            // true if the peer is known from this rendezvous
  std::vector<bool> seen_;             // true if the peer arrived in an earlier round
  std::vector<std::string> versions_;  // versions of this package, by rank; on rank 0 only
  bool allMet_ = false;                // true if all ranks met in the round, without a refusal
  bool said_ = false;                  // true if this rank has sent its message
  bool known_ = false;                 // true if the other ranks know, or will notice, the failure
};

}  // namespace torchcomms_pg
