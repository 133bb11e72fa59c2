#include "diagnosis/hang/Blame.hpp"

#include <algorithm>
#include <deque>
#include <iterator>
#include <set>
#include <unordered_map>
#include <utility>

namespace torchcomms_pg {

namespace {

void sortOnce(std::vector<int>& ranks) {
  std::ranges::sort(ranks);
  const auto twice = std::ranges::unique(ranks);
  ranks.erase(twice.begin(), twice.end());
}

void eraseThose(std::vector<int>& ranks, const std::vector<int>& sorted) {
  std::erase_if(
      ranks, [&](int rank) { return std::binary_search(sorted.begin(), sorted.end(), rank); });
}

// A rank of which this diagnosis knows nothing: it is outside the group, or its number is unknown.
constexpr int kElsewhere = -1;

// What a wait still needs, as far as is known: each rank of `ones` has to do its part, and one rank
// of each list of `anyOf`, which is for a receive from any rank. The ranks are nodes of the graph.
// Waits for one collective share their needs, so that the work for them is linear in the number of
// waits.
struct Needs {
  std::vector<int> ones;
  std::vector<std::vector<int>> anyOf;
  bool elsewhere = false;   // a rank of which nothing is known has to do its part
  std::vector<bool> isOne;  // by node: whether it is in `ones`

  bool hasOne(int node) const { return static_cast<size_t>(node) < isOne.size() && isOne[node]; }
  void add(int node) {
    isOne.resize(std::max(isOne.size(), static_cast<size_t>(node) + 1));
    isOne[node] = true;
    ones.push_back(node);
  }
  size_t size() const { return ones.size() + anyOf.size() + (elsewhere ? 1 : 0); }
};

// The graph of which rank waits for which, by the ranks' reports. A node is a rank; or with
// `byThread`, where a rank has waits of several threads, one of its threads.
class WaitGraph {
 public:
  WaitGraph(
      const DiagnosisRequest& request, const Answers& answers, const SilentRanks& silent,
      bool byThread)
      : request_(request),
        answers_(answers),
        silent_(silent),
        byThread_(byThread),
        nodes_(request.size) {
    for (int rank = 0; rank < request.size; ++rank) {
      ranks_[request.global(rank)] = rank;
      nodes_[rank].rank = rank;
      if (const auto found = answers.find(rank); found != answers.end()) {
        nodes_[rank].answer = &found->second;
        for (const auto& wait : found->second.waits) {
          nodes_[rank].waits.push_back(&wait);
        }
      }
    }
    for (const int rank : request.absent) {
      nodes_.at(rank).absent = true;
    }
  }

  // Returns whether a rank has waits that do not count, since another thread is needed.
  bool dividesRanks() const { return nodes_.size() > static_cast<size_t>(request_.size); }

  Blame blame() {
    Blame found;
    findDisagreement(found);
    follow(found);
    const auto late = found.lateRanks();
    eraseThose(found.gone, late);
    eraseThose(found.silent, late);
    eraseThose(found.silent, found.gone);
    findCircle(found);
    return found;
  }

  // Finds ranks that wait for each other in a circle: removes all ranks that may go on, and follows
  // the waits of the rest. Looks only at ranks to which the waits of the request lead.
  void findCircle(Blame& found) {
    const auto& first = needs(request_.rank, request_.wait);
    struct Use {
      std::vector<int> users;  // nodes that wait for these needs
      int stuck = 0;           // number of its `ones` that are stuck
    };
    std::unordered_map<const Needs*, Use> uses;
    std::vector<std::vector<const Needs*>> neededIn;  // by node
    std::vector<int> open;
    const auto reach = [&](int number) {
      auto& node = nodes_[number];
      if (!node.stuck && !node.waits.empty()) {
        node.stuck = true;
        open.push_back(number);
      }
    };
    const auto reachAll = [&](const Needs& needs) {
      if (uses.contains(&needs)) {
        return;
      }
      auto& use = uses[&needs];
      neededIn.resize(nodes_.size());
      const auto note = [&](int node) {
        reach(node);
        neededIn[node].push_back(&needs);
      };
      for (const int node : needs.ones) {
        note(node);
        use.stuck += nodes_[node].stuck ? 1 : 0;
      }
      for (const auto& any : needs.anyOf) {
        std::ranges::for_each(any, note);
      }
    };
    reachAll(first);
    for (size_t i = 0; i < open.size(); ++i) {
      const int node = open[i];
      for (const auto* const wait : nodes_[node].waits) {
        const auto& each = needs(nodes_[node].rank, *wait);
        reachAll(each);
        uses[&each].users.push_back(node);
      }
    }
    const auto allStuck = [&](const std::vector<int>& any) {
      return std::ranges::all_of(any, [&](int node) { return nodes_[node].stuck; });
    };
    const auto blocks = [&](const Needs& needs) {
      return uses[&needs].stuck > 0 || std::ranges::any_of(needs.anyOf, allStuck);
    };
    // A rank with several waits may go on if one of the waits may end.
    std::vector<int> freed;
    const auto free = [&](int node) {
      if (std::exchange(nodes_[node].stuck, false)) {
        freed.push_back(node);
      }
    };
    const auto look = [&](const Needs& needs) {
      if (!blocks(needs)) {
        std::ranges::for_each(uses[&needs].users, free);
      }
    };
    for (const auto& [needs, use] : uses) {
      look(*needs);
    }
    for (size_t i = 0; i < freed.size(); ++i) {
      for (const auto* const needs : neededIn[freed[i]]) {
        if (needs->hasOne(freed[i])) {
          --uses[needs].stuck;
        }
        look(*needs);
      }
    }
    int node = nextStuck(first);
    if (node == kElsewhere) {
      return;
    }
    std::vector<Blame::Link> way;
    std::vector<int> place(nodes_.size(), -1);
    while (place[node] < 0) {
      place[node] = static_cast<int>(way.size());
      const auto& wait = *nodes_[node].waits.front();
      way.push_back({nodes_[node].rank, wait});
      node = nextStuck(needs(nodes_[node].rank, wait));
    }
    way.erase(way.begin(), way.begin() + place[node]);
    // Starts with the lowest rank, so that every leader writes the same text.
    std::ranges::rotate(way, std::ranges::min_element(way, {}, &Blame::Link::rank));
    found.certain = std::ranges::none_of(way, [](const auto& link) { return link.wait.indirect; });
    found.circle = std::move(way);
  }

 private:
  // What another rank has to do.
  enum class Part { collective, send, receive };

  struct Node {
    int rank = 0;
    std::vector<const Wait*> waits;      // of all threads; of a thread, and of unknown ones
    const RankStatus* answer = nullptr;  // null for a rank that has not answered
    bool absent = false;                 // is in DiagnosisRequest::absent
    bool opened = false;                 // follow() has taken its waits
    int lateIn = -1;                     // place in Blame::late of the rank, if it is there
    bool stuck = false;                  // it waits, and findCircle() has not found that it goes on
  };

  // Finds the ranks whose operations disagree: with the operation asked about if the numbers are
  // equal, otherwise with another rank's operation of the same number. An operation that has
  // completed on one rank counts if another rank is in that number.
  void findDisagreement(Blame& found) const {
    const auto& asked = request_.signature;
    std::map<uint64_t, std::map<std::string, std::set<int>>> called;  // by number, by signature
    if (!asked.empty()) {
      called[request_.seq];
    }
    for (const auto& [rank, answer] : answers_) {
      if (!answer.signature.empty()) {
        called[answer.currentSeq][answer.signature].insert(rank);
      }
    }
    std::set<std::pair<uint64_t, int>> completed;
    for (const auto& [rank, answer] : answers_) {
      const auto& [text, number, signature] = answer.completed;
      if (const auto there = called.find(number); there != called.end() && !signature.empty()) {
        there->second[signature].insert(rank);
        completed.emplace(number, rank);
      }
    }
    std::set<int> ranks;
    for (const auto& [number, signatures] : called) {
      const bool isAsked = number == request_.seq && !asked.empty();
      for (const auto& [signature, who] : signatures) {
        if (isAsked ? signature == asked : signatures.size() == 1) {
          continue;
        }
        ranks.insert(who.begin(), who.end());
        std::ranges::copy_if(who, std::back_inserter(found.passed), [&](int rank) {
          return completed.contains({number, rank});
        });
      }
    }
    found.disagree.assign(ranks.begin(), ranks.end());
    std::ranges::sort(found.passed);
  }

  // Follows the waits from the operation asked about to the ranks that it needs, and further to the
  // ranks that these wait for. A receive from any of several ranks accuses none of them, since each
  // of the others may send.
  void follow(Blame& found) {
    std::deque<std::pair<int, const Wait*>> waits{{request_.rank, &request_.wait}};
    const auto open = [&](int node) {
      if (!std::exchange(nodes_[node].opened, true)) {
        for (const auto* const next : nodes_[node].waits) {
          waits.emplace_back(nodes_[node].rank, next);
        }
      }
    };
    // Places of the late ranks of the needs in Blame::late, or -1.
    std::unordered_map<const Needs*, int> followed;
    const std::vector<int> none;
    while (!waits.empty()) {
      const auto [waiting, wait] = waits.front();
      waits.pop_front();
      const auto& unmet = needs(waiting, *wait);
      const auto [known, isNew] = followed.emplace(&unmet, -1);
      for (const int node : isNew ? unmet.ones : none) {
        const int rank = nodes_[node].rank;
        if (wait == &request_.wait) {
          found.missing.push_back(rank);
        }
        const auto* const answer = nodes_[node].answer;
        if (answer == nullptr && !missedByLibrary(rank, *wait)) {
          const auto silent = silent_.find(rank);
          // The rank may have done its part, unless it is the only missing rank.
          const bool gone = unmet.size() == 1 && silent != silent_.end() && silent->second.gone;
          (gone ? found.gone : found.silent).push_back(rank);
        } else if (answer == nullptr || nodes_[node].waits.empty()) {
          if (const int place = addLate(found, rank, *wait); place >= 0) {
            known->second = place;
          }
        } else {
          open(node);
        }
      }
      if (known->second >= 0) {
        found.late[known->second].waiting.push_back(waiting);
      }
      // A root that has arrived may still hold up the others, so the search follows its waits, too.
      for (const auto& collective : wait->collectives) {
        if (const int root = local(collective.rank);
            collective.rank >= 0 && isIn(root, wait->group, collective.seq)) {
          open(nodeOf(root, *wait, Part::collective));
        }
      }
    }
    for (auto& late : found.late) {
      sortOnce(late.ranks);
      sortOnce(late.waiting);
    }
    sortOnce(found.missing);
    sortOnce(found.gone);
    sortOnce(found.silent);
  }

  // Lists a late rank under one operation only: the first that is found to wait for it. Returns the
  // place of the operation in Blame::late, or -1 if the rank is listed under another one.
  int addLate(Blame& found, int rank, const Wait& wait) {
    int& place = nodes_[rank].lateIn;
    if (place >= 0) {
      return isSameOperation(found.late[place].wait, wait) ? place : -1;
    }
    auto late = std::ranges::find_if(
        found.late, [&](const auto& other) { return isSameOperation(other.wait, wait); });
    if (late == found.late.end()) {
      late = found.late.insert(late, {wait, {}, {}});
    }
    late->ranks.push_back(rank);
    return place = static_cast<int>(late - found.late.begin());
  }

  // Returns the node of `rank`, which has to do its part before `wait` of another rank can end.
  int nodeOf(int rank, const Wait& wait, Part part) {
    const auto thread = rank == kElsewhere || !byThread_ ? 0 : threadFor(rank, wait.group, part);
    if (thread == 0) {
      return rank;
    }
    const auto counts = [&](const Wait* each) {
      return each->thread == 0 || each->thread == thread;
    };
    if (std::ranges::all_of(nodes_[rank].waits, counts)) {
      return rank;
    }
    const auto [known, isNew] =
        threads_.emplace(std::pair(rank, thread), static_cast<int>(nodes_.size()));
    if (isNew) {
      auto& node = nodes_.emplace_back();
      node.rank = rank;
      node.answer = nodes_[rank].answer;
      std::ranges::copy_if(nodes_[rank].waits, std::back_inserter(node.waits), counts);
    }
    return known->second;
  }

  // Returns the thread of the rank that is to do its part, or 0 if that is not known.
  uint64_t threadFor(int rank, uint64_t group, Part part) const {
    const auto* const answer = nodes_[rank].answer;
    if (answer == nullptr) {
      return 0;
    }
    const auto* const counts = countsOf(rank, group);
    const auto thread = counts == nullptr          ? uint64_t{0}
                        : part == Part::collective ? counts->collectivesThread
                        : part == Part::send       ? counts->sendsThread
                                                   : counts->receivesThread;
    return thread == 0 ? answer->mainThread : thread == kAnyThread ? 0 : thread;
  }

  // Returns a node that is stuck and that the needs wait for, or kElsewhere if only nodes that may
  // go on can meet them.
  int nextStuck(const Needs& needs) const {
    const auto isStuck = [&](int node) { return nodes_[node].stuck; };
    if (const auto one = std::ranges::find_if(needs.ones, isStuck); one != needs.ones.end()) {
      return *one;
    }
    const auto any = std::ranges::find_if(
        needs.anyOf, [&](const auto& each) { return std::ranges::all_of(each, isStuck); });
    return any == needs.anyOf.end() || any->empty() ? kElsewhere : any->front();
  }

  // Returns the needs of `wait` of `rank` that are not known to be met.
  const Needs& needs(int rank, const Wait& wait) {
    auto& known = needs_[&wait];
    if (known != nullptr) {
      return *known;
    }
    // The library's report is about no operation but the one asked about. A wait for a message is
    // this rank's own.
    if (&wait != &request_.wait && wait.group != 0 && wait.messages.empty() &&
        !wait.collectives.empty()) {
      std::vector<std::pair<uint64_t, int64_t>> what;
      for (const auto& collective : wait.collectives) {
        what.emplace_back(collective.seq, collective.rank);
      }
      auto& shared = sharedNeeds_[{wait.group, std::move(what)}];
      if (shared == nullptr) {
        shared = &made_.emplace_back(find(kElsewhere, wait));
      }
      if (!shared->hasOne(nodeOf(rank, wait, Part::collective))) {
        return *(known = shared);
      }
    }
    return *(known = &made_.emplace_back(find(rank, wait)));
  }

  // Returns the needs of a wait of `rank`, or with kElsewhere the needs of any rank's wait.
  Needs find(int rank, const Wait& wait) {
    Needs needs;
    if (wait.group == 0) {
      needs.elsewhere = true;
      return needs;
    }
    const auto need = [&](int other, Part part) {
      const int node = nodeOf(other, wait, part);
      if (node == kElsewhere) {
        needs.elsewhere = true;
      } else if (!needs.hasOne(node)) {
        needs.add(node);
      }
    };
    const auto partOf = [](const AwaitedMessage& message) {
      return message.kind == AwaitedMessage::Kind::send ? Part::receive : Part::send;
    };
    for (const auto& message : wait.messages) {
      if (message.peer != AwaitedMessage::kAnyRank) {
        if (const int peer = local(message.peer); !hasMet(peer, rank, wait, message)) {
          need(peer, partOf(message));
        }
      } else if (auto senders = others(rank, wait); !hasMetAny(senders, rank, wait, message)) {
        if (senders.size() == 1) {
          need(senders.front(), partOf(message));
        } else if (std::ranges::count(senders, kElsewhere) > 0) {
          needs.elsewhere = true;
        } else if (!senders.empty()) {
          for (int& sender : senders) {
            sender = nodeOf(sender, wait, partOf(message));
          }
          needs.anyOf.push_back(std::move(senders));
        }
      }
    }
    for (const auto& collective : wait.collectives) {
      const auto awaits = [&](int other) {
        if (!hasArrived(other, wait, collective.seq)) {
          need(other, Part::collective);
        }
      };
      if (collective.rank >= 0) {
        awaits(local(collective.rank));
      } else {
        std::ranges::for_each(others(rank, wait), awaits);
      }
    }
    if (wait.collectives.empty() && wait.messages.empty()) {
      // Operations such as making a group have no number. For the operation asked about, the
      // library may know which ranks are missing; otherwise ranks without an answer count as
      // missing.
      for (const int other : others(rank, wait)) {
        const bool asked = &wait == &request_.wait && !request_.absent.empty();
        if (other == kElsewhere ||
            (asked ? nodes_[other].absent : nodes_[other].answer == nullptr)) {
          need(other, Part::collective);
        }
      }
    }
    return needs;
  }

  bool hasArrived(int rank, const Wait& wait, uint64_t seq) const {
    if (rank == kElsewhere) {
      return false;
    }
    if (nodes_[rank].answer == nullptr) {
      // The library's report is about the oldest collective of the operation asked about.
      return &wait == &request_.wait && request_.absentIsAll &&
             seq == wait.collectives.front().seq && !nodes_[rank].absent;
    }
    const auto* const counts = countsOf(rank, wait.group);
    // A rank without counts of the group has left the group, after all of its operations.
    return counts == nullptr || counts->collectives >= seq;
  }

  // Returns whether the rank waits for this collective of the group, or for an earlier one.
  bool isIn(int rank, uint64_t group, uint64_t seq) const {
    return rank != kElsewhere && std::ranges::any_of(nodes_[rank].waits, [&](const Wait* wait) {
             return wait->group == group && !wait->collectives.empty() &&
                    wait->collectives.front().seq <= seq;
           });
  }

  // Returns whether `peer` has issued what `message` of `rank` waits for. Messages of all tags
  // count, so true may be wrong. False is certain if the peer has answered.
  bool hasMet(int peer, int rank, const Wait& wait, const AwaitedMessage& message) {
    if (peer == kElsewhere || nodes_[peer].answer == nullptr) {
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
      const std::vector<int>& senders, int rank, const Wait& wait, const AwaitedMessage& message) {
    uint64_t sent = 0;
    for (const int sender : senders) {
      if (sender == kElsewhere || nodes_[sender].answer == nullptr) {
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

  PeerCounts countsWith(const GroupCounts& counts, int rank) {
    auto& peers = peers_[&counts];
    if (peers.size() != counts.peers.size()) {
      for (const auto& each : counts.peers) {
        peers.emplace(each.peer, &each);
      }
    }
    const auto found = peers.find(request_.global(rank));
    return found == peers.end() ? PeerCounts{} : *found->second;
  }

  bool missedByLibrary(int rank, const Wait& wait) const {
    return &wait == &request_.wait && request_.absentIsAll && nodes_[rank].absent;
  }

  const GroupCounts* countsOf(int rank, uint64_t group) const {
    const auto& all = nodes_[rank].answer->counts;
    const auto found = std::ranges::find(all, group, &GroupCounts::group);
    return found == all.end() || group == 0 ? nullptr : &*found;
  }

  // Returns the group's other ranks; with kElsewhere all of them, and kElsewhere for each rank of
  // which nothing is known.
  std::vector<int> others(int rank, const Wait& wait) const {
    std::vector<int64_t> members;
    spread(wait.members, members);
    std::vector<int> others;
    for (const auto member : members) {
      if (const int other = local(member); other != rank || rank == kElsewhere) {
        others.push_back(other);
      }
    }
    return others;
  }

  int local(int64_t globalRank) const {
    const auto found = ranks_.find(globalRank);
    return found == ranks_.end() ? kElsewhere : found->second;
  }

  const DiagnosisRequest& request_;
  const Answers& answers_;
  const SilentRanks& silent_;
  const bool byThread_;
  std::deque<Node> nodes_;                           // the ranks come first
  std::map<std::pair<int, uint64_t>, int> threads_;  // other nodes, by rank and thread
  std::unordered_map<int64_t, int> ranks_;           // rank in the group, by global rank
  std::deque<Needs> made_;
  std::unordered_map<const Wait*, const Needs*> needs_;
  // By group, and by the numbers and roots of the collectives.
  std::map<std::pair<uint64_t, std::vector<std::pair<uint64_t, int64_t>>>, const Needs*>
      sharedNeeds_;
  std::unordered_map<const GroupCounts*, std::unordered_map<int64_t, const PeerCounts*>> peers_;
};

}  // namespace

std::vector<int> Blame::lateRanks() const {
  std::vector<int> ranks;
  for (const auto& each : late) {
    ranks.insert(ranks.end(), each.ranks.begin(), each.ranks.end());
  }
  sortOnce(ranks);
  return ranks;
}

Blame blame(const DiagnosisRequest& request, const Answers& answers, const SilentRanks& silent) {
  WaitGraph graph(request, answers, silent, /*byThread=*/true);
  auto found = graph.blame();
  if (found.circle.empty() && graph.dividesRanks()) {
    Blame perhaps;
    WaitGraph(request, answers, silent, /*byThread=*/false).findCircle(perhaps);
    found.perhaps = std::move(perhaps.circle);
  }
  return found;
}

}  // namespace torchcomms_pg
