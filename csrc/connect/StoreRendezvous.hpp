// Rendezvous of the ranks of a new communicator through the group's store.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "connect/Rendezvous.hpp"
#include "host/NcclError.hpp"
#include "host/Peer.hpp"
#include "operation/CommError.hpp"

namespace torchcomms_pg {

// First bytes of values in the store. Each says what follows: the requested value, ...
inline constexpr char kId = '=';
// ... the error for which no group can be made, see refusal(), ...
inline constexpr char kRefusal = '!';
// ... the reason why these ranks cannot share memory, ...
inline constexpr char kApart = '~';
// ... nothing, since a rank has given up waiting and the others meet in the next round, or ...
inline constexpr char kGivenUp = '-';
// ... two ranks, as in "2 5|", and a kId or kRefusal: the two have met for a message, and the other
// ranks meet in the next round.
inline constexpr char kPair = '+';

// Returns the value that tells all ranks why no group can be made. `ranks` are at fault.
inline std::string refusal(const std::string& why, std::vector<int> ranks = {}) {
  return kRefusal + host::encode({ncclRemoteError, why, std::move(ranks)});
}

// Raises CommError: the group could not be set up because of `why`, by the fault of `ranks`.
[[noreturn]] void failInit(
    const std::string& group, const std::string& why, std::vector<int> ranks = {});

// Returns the text of `error` without failInit()'s introduction and without torch's stack trace.
std::string reasonOf(const std::string& group, const std::exception& error);

// Returns "rank 2 <what> 'a'; ranks 0, 1 <what> 'b'" if the ranks' texts differ, else "". `pair`:
// the two ranks whose texts `said` has; empty if `said` has the texts of all ranks.
std::string differences(
    const std::vector<std::string>& said, const std::string& what,
    const std::vector<int>& pair = {});

// One rank's part in a rendezvous. Only one thread may use the object.
//
// Ranks may meet several times with one store and one `members` key, and a meeting may fail. So the
// ranks meet in rounds, each with separate keys. The first rank that decides a round decides it for
// all ranks. This is rank 0 when all ranks have arrived, or a rank that gives up waiting or cannot
// join. Of two ranks that want to connect for a message, the lower may also decide, after it has
// waited for the others. A rank enters the first round that is not over for this rank. So its
// second try meets the first try of a late rank, and values of earlier rounds have no effect. Of a
// round in which all ranks have met, only the number stays in the store.
class StoreRendezvous {
 public:
  explicit StoreRendezvous(const RendezvousInfo& info);

  Met met() const { return {prefix_, peers_, pair_}; }
  const std::vector<Peer>& peers() const { return peers_; }

  // Calls `body` and returns its result. If `body` raises, passes the reason to all ranks that
  // still wait, unless each of them notices the cause itself, such as a store that is gone.
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

  // Returns the error that the other ranks raise for this rank's `error`.
  host::NcclError blame(const std::exception& error) const;

  using Judge = std::function<std::string(const std::vector<std::string>&)>;

  // Collects on rank 0 each rank's text `mine`, process and host. Afterwards all ranks know the
  // processes and hosts. Rank 0 calls `judge` with the texts. All ranks return its result, kId or
  // kApart and a text, or raise the reason of a kRefusal. If two ranks meet alone, the lower rank
  // calls `judgePair` instead.
  std::string exchange(const std::string& mine, const Judge& judge, const Judge& judgePair);

  // Waits until all ranks have joined the library's communicator, or until the communicator has
  // failed; later calls then raise its failure. Raises if a rank has died, cannot join or is late.
  void awaitJoined(const Library& library, ncclComm_t comm);

  // If another rank has written that it cannot join, raises the reason of that rank.
  void checkRefused();

  // Raises if a rank has died or cannot join, if a signal handler has raised, or if this rank is no
  // longer to join. Each rank checks the known processes of its host. If one has died, tells the
  // ranks of all hosts.
  void look();

 private:
  void enter(int64_t round);

  // Returns whether the round has been decided and this rank need not read the answer.
  bool over();

  // Takes part in one round and returns its answer.
  std::string meet(const std::string& mine, const Judge& judge);

  // If this rank is lower than `peer`, and `peer` has arrived and wants this rank, decides the
  // round for the two and returns the answer. Otherwise returns an empty text.
  std::string meetPair();

  // Counts this rank as one that has read the answer. The last rank to be counted deletes the
  // round's keys. It is usually rank 0, which is often on the store's host: rank 0 counts itself
  // after it has joined the others.
  void forget();

  // Decides the round with `answer`, unless another rank was first. Returns the round's answer, or
  // kGivenUp if the first rank does not write the answer in time.
  std::string decide(const std::string& answer);

  // Calls `body` and returns its result. Raises CommError if the store is gone.
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

  // Raises an error that names a rank of this host that has died, or if none has, says that the
  // store is gone.
  [[noreturn]] void raiseStoreGone(const c10::Error& error);

  // Returns a dead rank of this host that this rank needs, or -1 if no such rank is known.
  int deadPeer() const;

  [[noreturn]] void raiseDied(int peer);

  std::string rankKey(int rank) const { return "rank/" + std::to_string(rank); }

  void set(const std::string& key, const std::string& value);

  // Returns the value of a key of the round, which is not empty, or nullopt if the key does not
  // exist. Raises CommError if the value is empty: no rank writes that.
  std::optional<std::string> value(const std::string& key);

  void tell(const host::NcclError& error) noexcept;

  [[noreturn]] void raiseDamaged(const std::string& answer);

  [[noreturn]] void raiseRefused(const std::string& text);

  // Takes the value `text` that rank `peer` has written: keeps the process and version in its first
  // line, and returns the text after its second line, which is the peer's `mine`. The second line
  // is the rank that `peer` wants.
  std::string hear(int peer, const std::string& text);

  // Returns a text that says how the ranks' versions of this package differ; empty if equal.
  std::string differentVersions() const;

  // Waits for a key of the round or for the answer, and returns the value that is stored first.
  std::string await(const std::string& key);

  // Returns the failure at the deadline. `missing`: ranks that have arrived but not joined.
  Failure lateRanks(std::vector<int> missing = {});

  const RendezvousInfo& info_;
  const Peer self_ = Peer::self();
  c10d::Store& store_;
  const int64_t ranks_;  // ranks that poll the store at the same time, in all parts of the group
  const Clock::time_point deadline_;
  const std::string home_;  // prefix of the keys of all rounds
  std::string mine_;        // this rank's text, see exchange()
  Judge judgePair_;
  std::vector<int> pair_;
  int64_t met_ = 0;  // last known round in which all ranks met
  int64_t round_ = 0;
  std::string prefix_;                 // prefix of the round's keys
  std::vector<Peer> peers_;            // by rank, as far as known
  std::vector<bool> heard_;            // by rank: true if this rank has read its value
  std::vector<bool> seen_;             // by rank: true if it arrived in an earlier round
  std::vector<std::string> versions_;  // versions of this package, by rank; on rank 0 only
  bool allMet_ = false;                // true if all ranks have met, without a refusal
  bool said_ = false;                  // true if this rank has written its value of the round
  bool known_ = false;                 // true if other ranks know or will notice the failure
};

}  // namespace torchcomms_pg
