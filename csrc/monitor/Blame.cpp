#include "monitor/Blame.hpp"

#include <algorithm>
#include <deque>
#include <set>

namespace torchcomms_pg {

namespace {

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

void add(std::vector<int>& ranks, int rank) {
  if (!contains(ranks, rank)) {
    ranks.insert(std::upper_bound(ranks.begin(), ranks.end(), rank), rank);
  }
}

// A rank of which this diagnosis knows nothing: it is outside the group, or its number is unknown.
constexpr int kElsewhere = -1;

// A condition of a wait: one of these ranks has to do its part. Has several ranks only for a
// receive from any rank.
using Need = std::vector<int>;

// The graph of which rank waits for which, by the ranks' reports.
class WaitGraph {
 public:
  WaitGraph(
      const DiagnosisRequest& request,
      const std::map<int, RankStatus>& answers,
      const std::map<int, Silent>& silent)
      : request_(request), answers_(answers), silent_(silent) {
    for (int rank = 0; rank < request.size; ++rank) {
      ranks_[global(rank)] = rank;
    }
  }

  Blame blame() {
    Blame found;
    found.disagree = disagreeing();
    follow(found);
    const auto late = found.lateRanks();
    std::erase_if(found.gone, [&](int rank) { return contains(late, rank); });
    std::erase_if(
        found.silent, [&](int rank) { return contains(late, rank) || contains(found.gone, rank); });
    findCircle(found);
    return found;
  }

 private:
  // Returns the ranks whose operations disagree: with the operation asked about if the numbers are
  // equal, otherwise with another rank's operation of the same number.
  std::vector<int> disagreeing() const {
    std::map<uint64_t, std::map<std::string, std::vector<int>>> called;  // by number, by signature
    for (const auto& [rank, answer] : answers_) {
      if (!answer.signature.empty()) {
        called[answer.currentSeq][answer.signature].push_back(rank);
      }
    }
    std::vector<int> ranks;
    const auto& asked = request_.signature;
    for (const auto& [number, signatures] : called) {
      const bool isAsked = number == request_.seq && !asked.empty();
      for (const auto& [signature, who] : signatures) {
        if (isAsked ? signature != asked : signatures.size() > 1) {
          ranks.insert(ranks.end(), who.begin(), who.end());
        }
      }
    }
    return ranks;
  }

  // Follows the waits from the operation asked about to the ranks that it needs, and further to the
  // ranks that these wait for. A receive from any of several ranks accuses none of them, since each
  // of the others may send.
  void follow(Blame& found) const {
    std::deque<std::pair<int, const Wait*>> waits{{request_.rank, &request_.wait}};
    std::set<int> seen;
    const auto open = [&](int rank) {
      if (seen.insert(rank).second) {
        for (const auto& next : answers_.at(rank).waits) {
          waits.emplace_back(rank, &next);
        }
      }
    };
    while (!waits.empty()) {
      const auto [waiting, wait] = waits.front();
      waits.pop_front();
      const auto unmet = needs(waiting, *wait);
      for (const auto& need : unmet) {
        const int rank = need.front();
        if (need.size() > 1 || rank == kElsewhere) {
          continue;
        }
        if (wait == &request_.wait) {
          add(found.missing, rank);
        }
        const auto answer = answers_.find(rank);
        if (answer == answers_.end() && !missedByLibrary(rank, *wait)) {
          const auto known = silent_.find(rank);
          // The rank may have done its part, unless it is the only missing rank.
          const bool gone = unmet.size() == 1 && known != silent_.end() && known->second.gone;
          add(gone ? found.gone : found.silent, rank);
        } else if (answer == answers_.end() || answer->second.waits.empty()) {
          addLate(found, rank, waiting, *wait);
        } else {
          open(rank);
        }
      }
      // A root that has arrived may still hold up the others, so the search follows its waits, too.
      for (const auto& collective : wait->collectives) {
        if (const int root = local(collective.rank);
            collective.rank >= 0 && isIn(root, wait->group, collective.seq)) {
          open(root);
        }
      }
    }
  }

  // Lists a late rank under the first operation that leads to it, and under no other operation.
  static void addLate(Blame& found, int rank, int waiting, const Wait& wait) {
    const auto isOther = [&](const auto& other) {
      return contains(other.ranks, rank) && !isSameOperation(other.wait, wait);
    };
    if (std::ranges::any_of(found.late, isOther)) {
      return;
    }
    auto late = std::find_if(found.late.begin(), found.late.end(), [&](const auto& other) {
      return isSameOperation(other.wait, wait);
    });
    if (late == found.late.end()) {
      late = found.late.insert(late, {wait, {}, {}});
    }
    add(late->ranks, rank);
    add(late->waiting, waiting);
  }

  // Finds ranks that wait for each other in a circle: removes all ranks that may go on, and follows
  // the waits of the rest.
  void findCircle(Blame& found) const {
    std::set<int> stuck;
    for (const auto& [rank, answer] : answers_) {
      if (!answer.waits.empty()) {
        stuck.insert(rank);
      }
    }
    // A rank with several waits may go on if one of the waits may end.
    const auto mayGoOn = [&](int rank) {
      const auto& waits = answers_.at(rank).waits;
      return std::any_of(waits.begin(), waits.end(), [&](const Wait& wait) {
        return stuckNeed(rank, wait, stuck).empty();
      });
    };
    for (bool changed = true; changed;) {
      changed = std::erase_if(stuck, mayGoOn) > 0;
    }
    const auto first = stuckNeed(request_.rank, request_.wait, stuck);
    if (first.empty()) {
      return;
    }
    std::vector<Blame::Link> way;
    for (int rank = first.front();;) {
      const auto again = std::find_if(
          way.begin(), way.end(), [rank](const auto& link) { return link.rank == rank; });
      if (again != way.end()) {
        way.erase(way.begin(), again);
        break;
      }
      const auto& wait = answers_.at(rank).waits.front();
      way.push_back({rank, wait});
      rank = stuckNeed(rank, wait, stuck).front();
    }
    // Starts with the lowest rank, so that every leader writes the same text.
    std::rotate(
        way.begin(),
        std::min_element(
            way.begin(), way.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; }),
        way.end());
    found.certain =
        std::none_of(way.begin(), way.end(), [](const auto& link) { return link.wait.indirect; });
    found.circle = std::move(way);
  }

  // Returns a need of the wait that only ranks of `stuck` could meet, or an empty one if the wait
  // has no such need.
  Need stuckNeed(int rank, const Wait& wait, const std::set<int>& stuck) const {
    for (auto& need : needs(rank, wait)) {
      if (std::all_of(
              need.begin(), need.end(), [&](int other) { return stuck.count(other) != 0; })) {
        return std::move(need);
      }
    }
    return {};
  }

  // Returns the needs of `wait` of `rank` that are not known to be met.
  std::vector<Need> needs(int rank, const Wait& wait) const {
    std::vector<Need> needs;
    if (wait.group == 0) {
      return {{kElsewhere}};
    }
    for (const auto& message : wait.messages) {
      if (message.peer == AwaitedMessage::kAnyRank) {
        if (auto senders = others(rank, wait); !hasMetAny(senders, rank, wait, message)) {
          needs.push_back(std::move(senders));
        }
      } else if (const int peer = local(message.peer); !hasMet(peer, rank, wait, message)) {
        needs.push_back({peer});
      }
    }
    for (const auto& collective : wait.collectives) {
      for (const int other :
           collective.rank >= 0 ? Need{local(collective.rank)} : others(rank, wait)) {
        if (!hasArrived(other, wait, collective.seq) && !contains(needs, Need{other})) {
          needs.push_back({other});
        }
      }
    }
    if (wait.collectives.empty() && wait.messages.empty()) {
      // Operations such as making a group have no number. For the operation asked about, the
      // library may know which ranks are missing; otherwise ranks without an answer count as
      // missing.
      for (const int other : others(rank, wait)) {
        if (&wait != &request_.wait || request_.absent.empty() ? answers_.count(other) == 0
                                                               : contains(request_.absent, other)) {
          needs.push_back({other});
        }
      }
    }
    return needs;
  }

  bool hasArrived(int rank, const Wait& wait, uint64_t seq) const {
    if (rank == kElsewhere) {
      return false;
    }
    if (answers_.count(rank) == 0) {
      // The library's report is about the oldest collective of the operation asked about.
      return &wait == &request_.wait && request_.absentIsAll &&
             seq == wait.collectives.front().seq && !contains(request_.absent, rank);
    }
    const auto* const counts = countsOf(rank, wait.group);
    // A rank without counts of the group has left the group, after all of its operations.
    return counts == nullptr || counts->collectives >= seq;
  }

  // Returns whether the rank waits for this collective of the group, or for an earlier one.
  bool isIn(int rank, uint64_t group, uint64_t seq) const {
    const auto answer = answers_.find(rank);
    return answer != answers_.end() &&
           std::ranges::any_of(answer->second.waits, [&](const Wait& wait) {
             return wait.group == group && !wait.collectives.empty() &&
                    wait.collectives.front().seq <= seq;
           });
  }

  // Returns whether `peer` has issued what `message` of `rank` waits for. Messages of all tags
  // count, so true may be wrong. False is certain if the peer has answered.
  bool hasMet(int peer, int rank, const Wait& wait, const AwaitedMessage& message) const {
    if (peer == kElsewhere || answers_.count(peer) == 0) {
      return false;
    }
    const auto* const counts = countsOf(peer, wait.group);
    if (counts == nullptr) {
      return true;
    }
    const auto with = countsWith(*counts, rank);
    switch (message.kind) {
      case AwaitedMessage::Kind::send:
        return with.received + counts->receivedFromAny >= message.number;
      case AwaitedMessage::Kind::receive: return with.sent >= message.number;
      case AwaitedMessage::Kind::signal: return with.signalled >= message.number;
    }
    return true;
  }

  // Returns whether the message may have been issued: the senders have issued more messages to the
  // rank than it has received. True may be wrong. False is certain if all senders have answered.
  bool hasMetAny(
      const Need& senders, int rank, const Wait& wait, const AwaitedMessage& message) const {
    uint64_t sent = 0;
    for (const int sender : senders) {
      if (sender == kElsewhere || answers_.count(sender) == 0) {
        continue;
      }
      const auto* const counts = countsOf(sender, wait.group);
      if (counts == nullptr) {
        return true;
      }
      sent += countsWith(*counts, rank).sent;
    }
    return message.kind == AwaitedMessage::Kind::receive && sent >= message.number;
  }

  PeerCounts countsWith(const GroupCounts& counts, int rank) const {
    const auto found = std::find_if(
        counts.peers.begin(), counts.peers.end(), [me = global(rank)](const auto& each) {
          return each.peer == me;
        });
    return found == counts.peers.end() ? PeerCounts{} : *found;
  }

  bool missedByLibrary(int rank, const Wait& wait) const {
    return &wait == &request_.wait && request_.absentIsAll && contains(request_.absent, rank);
  }

  const GroupCounts* countsOf(int rank, uint64_t group) const {
    const auto& all = answers_.at(rank).counts;
    const auto found = std::find_if(
        all.begin(), all.end(), [group](const auto& counts) { return counts.group == group; });
    return found == all.end() || group == 0 ? nullptr : &*found;
  }

  Need others(int rank, const Wait& wait) const {
    Need others;
    for (const auto member : wait.members) {
      if (const int other = local(member); other != rank) {
        others.push_back(other);
      }
    }
    return others;
  }

  int64_t global(int rank) const {
    const auto& all = request_.globalRanks;
    return static_cast<size_t>(rank) < all.size() ? all[rank] : rank;
  }

  int local(int64_t globalRank) const {
    const auto found = ranks_.find(globalRank);
    return found == ranks_.end() ? kElsewhere : found->second;
  }

  const DiagnosisRequest& request_;
  const std::map<int, RankStatus>& answers_;
  const std::map<int, Silent>& silent_;
  std::map<int64_t, int> ranks_;  // rank in the group, by global rank
};

}  // namespace

std::vector<int> Blame::lateRanks() const {
  std::vector<int> ranks;
  for (const auto& each : late) {
    for (const int rank : each.ranks) {
      add(ranks, rank);
    }
  }
  return ranks;
}

Blame blame(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, Silent>& silent) {
  return WaitGraph(request, answers, silent).blame();
}

}  // namespace torchcomms_pg
