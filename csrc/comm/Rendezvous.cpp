#include "comm/Rendezvous.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "comm/CommError.hpp"
#include "comm/Communicator.hpp"
#include "comm/StoreRendezvous.hpp"
#include "host/Interrupt.hpp"
#include "host/Process.hpp"
#include "shm/segment/Layout.hpp"

namespace torchcomms_pg {

namespace {

// First byte of a value in the store: the requested value follows, ...
constexpr char kId = '=';
// ... or the reason why there will be no group, after the ranks at fault and '|', ...
constexpr char kRefusal = '!';
// ... or the reason why these ranks cannot share memory.
constexpr char kApart = '~';

// Intervals in which a waiting rank looks whether the others are still alive, and whether it is
// itself to stop: while it waits for the store, and while the library joins the ranks.
constexpr Milliseconds kLook{250};
constexpr Milliseconds kLookWhileJoining{50};

// Longest interval in which it asks the library then, for each rank of the host: they share its
// cores.
constexpr std::chrono::microseconds kJoiningPollOfRank{10};

// Intervals in which it asks the store, which would print a warning each time if it waited there
// for a limited time. They grow, and grow longer the more ranks take part in the rendezvous, since
// one process answers all of them.
constexpr std::chrono::microseconds kFirstPoll{200};
constexpr std::chrono::microseconds kLastPoll{20'000};
constexpr std::chrono::microseconds kPollOfRank{100};

std::string introduction(const std::string& group) {
  return "group '" + group + "' could not be set up: ";
}

[[noreturn]] void raise(
    const std::string& group, const std::string& why, std::vector<int> ranks = {}) {
  Failure failure;
  failure.op = "init";
  failure.group = group;
  failure.ranks = std::move(ranks);
  failure.message = introduction(group) + why;
  throw CommError(failure);
}

// Returns the text of `error`, without the group and without torch's stack.
std::string reasonOf(const std::string& group, const std::exception& error) {
  std::string text = error.what();
  if (const auto* const failure = dynamic_cast<const CommError*>(&error)) {
    text = failure->failure().message;
  } else if (const auto* const raised = dynamic_cast<const c10::Error*>(&error)) {
    text = raised->what_without_backtrace();
  }
  const auto known = introduction(group);
  return text.compare(0, known.size(), known) == 0 ? text.substr(known.size()) : text;
}

// Writes "rank 2 <what> 'a'; ranks 0, 1 <what> 'b'" where the ranks say different things, else "".
std::string differences(const std::vector<std::string>& said, const std::string& what) {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    ranks[said[rank]].push_back(static_cast<int>(rank));
  }
  if (ranks.size() == 1) {
    return "";
  }
  std::string text;
  for (const auto& [word, members] : ranks) {
    text += (text.empty() ? "" : "; ") + std::string(members.size() == 1 ? "rank " : "ranks ") +
            joinRanks(members) + " " + what + " '" + word + "'";
  }
  return text;
}

// Keeps the monitor's threads, which the communicator will need, from now on: where they cannot be
// started, that shows before the other ranks count on this one.
class MonitorRuns final : public Monitor::Watched {
 public:
  MonitorRuns() { Monitor::get().add(this); }
  ~MonitorRuns() override { Monitor::get().remove(this); }
  void check(Clock::time_point) noexcept override {}
  void giveUp(const char*) noexcept override {}
  std::string failureMessage() const override { return ""; }
};

class Rendezvous {
 public:
  explicit Rendezvous(const RendezvousInfo& info)
      : info_(info),
        store_(*info.store),
        peers_(info.known),
        heard_(info.size, false),
        versions_(info.rank == 0 ? info.size : 0) {
    peers_.resize(info.size);
    // One store and name may serve one group after another, also of other ranks. Every member
    // counts its own arrivals with these members, so that all agree on which group this is.
    prefix_ = "torchcomms_pg/" + keyOf(info.members) + "/";
    const auto generation = store_.add(prefix_ + "arrivals/" + std::to_string(info.rank), 1);
    prefix_ += std::to_string(generation) + "/";
  }

  const std::string& prefix() const { return prefix_; }
  const std::vector<Peer>& peers() const { return peers_; }

  // Calls `body`. Where it raises, tells the reason to all ranks that still wait, unless each finds
  // it out by itself.
  template <class Body>
  auto run(const Body& body) {
    try {
      return body();
    } catch (const std::exception& error) {
      if (!known_) {
        const auto [why, ranks] = blame(error);
        tell(ranks, why);
      }
      throw;
    }
  }

  // Returns the reason that the other ranks get for `error`, and the ranks at fault.
  std::pair<std::string, std::vector<int>> blame(const std::exception& error) const {
    auto reason = reasonOf(info_.group.name, error);
    if (known_) {
      const auto* const failure = dynamic_cast<const CommError*>(&error);
      return {
          std::move(reason), failure == nullptr ? std::vector<int>() : failure->failure().ranks};
    }
    return {"rank " + std::to_string(info_.rank) + " cannot join: " + reason, {info_.rank}};
  }

  // Collects on rank 0 what every rank says of itself, and where it is, which all know afterwards.
  // All return what `judge` makes of it on rank 0: kId or kApart, and a text. All raise the text of
  // a kRefusal.
  std::string exchange(
      const std::string& mine,
      const std::function<std::string(const std::vector<std::string>&)>& judge) {
    if (self_.startTime == 0) {
      raise(info_.group.name, std::string("/proc/self/stat cannot be read: ") + strerror(errno));
    }
    set(rankKey(info_.rank), kId + self_.text() + " " + TORCHCOMMS_PG_VERSION + "\n" + mine);
    said_ = true;
    std::string answer;
    if (info_.rank == 0) {
      std::vector<std::string> said;
      for (int peer = 0; peer < info_.size; ++peer) {
        said.push_back(hear(peer, await(rankKey(peer))));
      }
      answer = differentVersions();
      answer = answer.empty() ? judge(said) : kRefusal + answer;
      std::string all(1, answer.front());
      if (answer.front() == kRefusal) {
        all += "|";
      } else {
        for (size_t peer = 0; peer < peers_.size(); ++peer) {
          all += peers_[peer].text(peer == 0 ? nullptr : &peers_[peer - 1]) + "\n";
        }
      }
      answer = all + answer.substr(1);
      set("answer", answer);
    } else {
      answer = await("answer");
    }
    if (!answer.empty() && answer.front() == kRefusal) {
      raiseRefused(answer);
    }
    size_t begin = 1;
    const Peer* previous = nullptr;
    for (auto& peer : peers_) {
      const auto end = answer.find('\n', begin);
      if (end == std::string::npos) {
        raise(
            info_.group.name,
            "rank 0's answer in the store, of " + std::to_string(answer.size()) +
                " bytes, is damaged: all ranks need the same torchcomms_pg, and a store that no "
                "other program writes to");
      }
      peer = Peer::parse(answer.substr(begin, end - begin), previous);
      previous = &peer;
      begin = end + 1;
    }
    heard_.assign(info_.size, true);
    return answer.front() + answer.substr(begin);
  }

  // Returns when all ranks have joined the library's communicator.
  void awaitJoined(const NcclApi& api, ncclComm_t comm) {
    auto poll = kFirstPoll;
    for (auto next = Clock::now() + kLookWhileJoining;; poll += poll / 4) {
      ncclResult_t state = ncclSuccess;
      const auto asked = api.commGetAsyncError(comm, &state);
      state = asked == ncclSuccess ? state : asked;
      if (state == ncclSuccess) {
        return;
      }
      if (state != ncclInProgress) {
        look();
        return;  // no rank has failed to join: it was made, and has failed since
      }
      if (const auto now = Clock::now(); now >= next) {
        next = now + std::max<Clock::duration>(kLookWhileJoining, turn_);
        look();
        if (now >= deadline_) {
          known_ = true;
          auto failure = lateRanks();
          if (failure.ranks.empty() && api.absentRanks != nullptr) {
            failure.ranks = api.absentRanks(comm);
          }
          throw CommError(std::move(failure));
        }
      }
      poll = std::min(poll, std::max(kFirstPoll, info_.size * kJoiningPollOfRank));
      std::this_thread::sleep_for(poll);
    }
  }

  // Raises the reason, if another rank has given one, why it cannot join.
  void checkRefused() {
    if (store_.check({prefix_ + "refused"})) {
      raiseRefused(get("refused"));
    }
  }

  // Raises where a rank has died, or cannot join, or this one is to stop. Until all know of all,
  // rank 0 looks after the others, and they look after rank 0.
  void look() {
    if (host::interrupted()) {
      std::rethrow_exception(host::takeInterrupt());
    }
    const bool all = info_.rank == 0 || heard_.back();
    for (int peer = 0; peer < (all ? info_.size : 1); ++peer) {
      if (!heard_[peer] && store_.check({prefix_ + rankKey(peer)})) {
        hear(peer, get(rankKey(peer)));
      }
      if (peers_[peer].sameHost(self_) && peers_[peer].dead()) {
        const auto text =
            "rank " + std::to_string(peer) + " (pid " + std::to_string(peers_[peer].pid) + ") died";
        tell({peer}, text);
        raise(info_.group.name, text, {peer});
      }
    }
    checkRefused();
  }

 private:
  std::string rankKey(int rank) const { return "rank/" + std::to_string(rank); }

  void set(const std::string& key, const std::string& value) {
    store_.set(prefix_ + key, std::vector<uint8_t>(value.begin(), value.end()));
  }

  std::string get(const std::string& key) {
    const auto value = store_.get(prefix_ + key);
    return {value.begin(), value.end()};
  }

  void tell(const std::vector<int>& ranks, const std::string& why) noexcept {
    known_ = true;
    try {
      const auto text = kRefusal + joinRanks(ranks) + "|" + why;
      set("refused", text);
      if (!said_) {
        set(rankKey(info_.rank), text);
      }
      if (info_.rank == 0) {
        set("answer", text);
      }
    } catch (const std::exception&) {
      // The store is gone, which the others find out too.
    }
  }

  [[noreturn]] void raiseRefused(const std::string& text) {
    known_ = true;
    const auto bar = std::min(text.find('|'), text.size() - 1);
    std::istringstream listed(text.substr(1, bar - 1));
    std::vector<int> ranks;
    for (int rank = 0; listed >> rank; listed.ignore(2)) {
      ranks.push_back(rank);
    }
    raise(info_.group.name, text.substr(bar + 1), std::move(ranks));
  }

  // Returns what rank `peer` has said, after the line about its place and version.
  std::string hear(int peer, const std::string& text) {
    if (text.front() == kRefusal) {
      tellAgain(text);
    }
    const auto end = text.find('\n');
    const auto line = text.substr(1, end - 1);
    peers_[peer] = Peer::parse(line);
    if (info_.rank == 0) {
      versions_[peer] = line.substr(line.rfind(' ') + 1);
    }
    heard_[peer] = true;
    return text.substr(end + 1);
  }

  // Describes how the versions of this package differ; empty: they do not.
  std::string differentVersions() const {
    std::vector<std::string> versions;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      versions.push_back(versions_[rank] + "' on host '" + peers_[rank].host);
    }
    return std::ranges::count(versions_, versions_.front()) == info_.size
               ? ""
               : differences(versions, "with torchcomms_pg") +
                     "; install the same version on all hosts";
  }

  [[noreturn]] void tellAgain(const std::string& refusal) {
    if (info_.rank == 0) {
      set("answer", refusal);
    }
    raiseRefused(refusal);
  }

  std::string await(const std::string& key) {
    auto next = Clock::now() + kLook;
    for (auto poll = kFirstPoll; !store_.check({prefix_ + key}); poll += poll / 4) {
      poll = std::min(poll, std::max(kLastPoll, turn_));
      std::this_thread::sleep_for(poll);
      const auto now = Clock::now();
      if (now >= deadline_) {
        known_ = true;
        throw CommError(lateRanks());
      }
      if (now >= next) {
        look();
        next = Clock::now() + std::max<Clock::duration>(kLook, turn_);
      }
    }
    return get(key);
  }

  Failure lateRanks() {
    std::vector<int> missing;
    for (int peer = 0; peer < info_.size; ++peer) {
      if (!store_.check({prefix_ + rankKey(peer)})) {
        missing.push_back(peer);
      }
    }
    Failure failure;
    failure.type = c10d::ErrorType::TIMEOUT;
    failure.op = "init";
    failure.group = info_.group.name;
    failure.ranks = missing;
    failure.message =
        "group '" + failure.group + "' could not be set up on rank " + std::to_string(info_.rank) +
        " within " + inSeconds(info_.timeout) + ": " +
        (!missing.empty() ? (missing.size() == 1 ? "rank " : "ranks ") + joinRanks(missing) +
                                " did not come; every rank of the group must create it"
         : heard_.back()  ? std::string("not all ranks have joined")
                          : std::string("rank 0 did not answer"));
    return failure;
  }

  const RendezvousInfo& info_;
  const Peer self_ = Peer::self();
  c10d::Store& store_;
  // Longest time between two requests to the store of a rank that has waited for long.
  const std::chrono::microseconds turn_ = std::max(info_.size, info_.around) * kPollOfRank;
  const Clock::time_point deadline_ = Clock::now() + info_.timeout;
  std::string prefix_;
  std::vector<Peer> peers_;            // by rank, as far as they are known
  std::vector<bool> heard_;            // true: the peer is known from this rendezvous
  std::vector<std::string> versions_;  // versions of this package, by rank; on rank 0 only
  bool said_ = false;                  // true: this rank has introduced itself
  bool known_ = false;                 // true: the other ranks know of the failure, or will
};

void check(const NcclApi& api, ncclResult_t result, const std::string& group) {
  if (result == ncclSuccess || result == ncclInProgress) {
    return;
  }
  const std::string text = api.getLastError(nullptr);
  failInit(group, text.empty() ? api.getErrorString(result) : text);
}

// Starts joining the ranks that share `id`, in host memory; the communicator goes on by itself.
// `config`, or a copy, has to live as long as it does.
ncclComm_t joinHere(
    const NcclApi& api,
    const ncclUniqueId& id,
    const RendezvousInfo& info,
    const NcclConfig& config) {
  auto raw = config.raw(/*blocking=*/false);
  ncclComm_t comm = nullptr;
  check(api, api.commInitRankConfig(&comm, info.size, id, info.rank, &raw), info.group.name);
  return comm;
}

// Makes a unique id, after kId; or the reason why there is none, after kRefusal.
std::string newId(const NcclApi& api, int rank) {
  ncclUniqueId id;
  if (api.getUniqueId(&id) != ncclSuccess) {
    return kRefusal + ("rank " + std::to_string(rank) + " could not make a unique id: ") +
           api.getLastError(nullptr);
  }
  return kId + std::string(id.internal, sizeof(id.internal));
}

// Reads the `count` unique ids from rank 0's answer. Raises where the store has anything else in
// its place.
std::vector<ncclUniqueId> readIds(
    const RendezvousInfo& info, const std::string& answer, size_t count) {
  const size_t wanted = count * sizeof(ncclUniqueId);
  if (answer.front() != kId || answer.size() - 1 != wanted) {
    failInit(
        info.group.name,
        "rank 0's answer in the store, of " + std::to_string(answer.size()) + " bytes, is not " +
            (count == 1 ? std::string("a unique id") : std::to_string(count) + " unique ids") +
            " as rank " + std::to_string(info.rank) +
            " wants them: all ranks need the same torchcomms_pg and the same "
            "TORCH_NCCL_RANKS_PER_ROOT, and a store that no other program writes to");
  }
  std::vector<ncclUniqueId> ids(count);
  std::memcpy(ids.data(), answer.data() + 1, wanted);
  return ids;
}

// Describes why ranks cannot share memory; empty: they can.
std::string whoIsElsewhere(const std::vector<Peer>& peers) {
  std::vector<std::string> hosts;
  std::vector<std::string> places;
  for (const auto& peer : peers) {
    hosts.push_back(peer.host);
    places.push_back(peer.place());
  }
  const auto different = differences(hosts, "on host");
  return different.empty() ? differences(places, "in container (host/boot-pid namespace)")
                           : different;
}

// Describes which host has too many ranks; empty: none.
std::string fullHost(const std::vector<Peer>& peers) {
  std::map<std::string, int> ranks;
  for (const auto& peer : peers) {
    if (++ranks[peer.place()] > shm::kMaxRanks) {
      return "host '" + peer.host + "' has more than " + std::to_string(shm::kMaxRanks) +
             " ranks of the group, which is the most that can share memory; start fewer on it";
    }
  }
  return "";
}

// Returns the ranks that make the unique ids, in the ids' order: spread over the ranks as NCCL
// expects it.
std::vector<int> rootsOf(int size, int count) {
  std::vector<int> roots;
  for (int i = 0; i < count; ++i) {
    roots.push_back(i * (size / count) + std::min(i, size % count));
  }
  return roots;
}

// Returns rank 0's answer to what the ranks said: their versions, and after these the roots' ids.
std::string gatherIds(const std::vector<std::string>& said, const std::vector<int>& roots) {
  std::vector<std::string> versions;
  std::vector<std::string> ids;
  for (const auto& text : said) {
    const auto end = std::min(text.find_first_of({kId, kRefusal}), text.size());
    versions.push_back(text.substr(0, end));
    ids.push_back(text.substr(end));
  }
  if (const auto different = differences(versions, "with NCCL"); !different.empty()) {
    return kRefusal + different +
           "; all ranks must load the same version (python -m torchcomms_pg.nccl tells which)";
  }
  std::string all(1, kId);
  for (const int root : roots) {
    if (ids[root].empty()) {
      return kRefusal + ("rank " + std::to_string(root)) +
             " made no unique id; TORCH_NCCL_RANKS_PER_ROOT must be the same on all ranks";
    }
    if (ids[root].front() == kRefusal) {
      return ids[root];
    }
    all += ids[root].substr(1);
  }
  return all;
}

}  // namespace

std::string keyOf(const std::string& name) {
  constexpr size_t kLongest = 200;
  if (name.size() <= kLongest) {
    return name;
  }
  return name.substr(0, kLongest) + "..." + std::to_string(name.size()) + "/" +
         std::to_string(host::hashBytes(name.data(), name.size()));
}

JoinResult joinOnHost(
    const NcclApi& api, const RendezvousInfo& info, const Make& make, const NcclConfig& config) {
  if (info.size == 1) {
    std::vector<ncclUniqueId> ids(1);
    check(api, api.getUniqueId(&ids.front()), info.group.name);
    return {make(joinHere(api, ids.front(), info, config), ""), "", {}};
  }
  StoreRendezvous rendezvous(info);
  return rendezvous.run([&]() -> JoinResult {
    const MonitorRuns monitor;
    const auto answer = rendezvous.exchange("", [&](const std::vector<std::string>&) {
      if (const auto full = fullHost(rendezvous.peers()); !full.empty()) {
        return kRefusal + full;
      }
      const auto elsewhere = whoIsElsewhere(rendezvous.peers());
      return elsewhere.empty() ? newId(api, 0) : kApart + elsewhere;
    });
    if (answer.front() == kApart) {
      return {nullptr, answer.substr(1), rendezvous.peers()};
    }
    auto* const handle = joinHere(api, readIds(info, answer, 1).front(), info, config);
    auto comm = make(handle, rendezvous.prefix());
    try {
      rendezvous.awaitJoined(api, handle);
    } catch (const std::exception& error) {
      if (api.fail != nullptr) {
        const auto [why, ranks] = rendezvous.blame(error);
        api.fail(handle, ncclRemoteError, why, ranks);
      }
      throw;
    }
    return {std::move(comm), "", rendezvous.peers()};
  });
}

NcclRendezvous rendezvousOverNccl(
    const Library& library, const RendezvousInfo& info, int ranksPerRoot) {
  const auto& api = library.api();
  NcclRendezvous met;
  if (info.size == 1) {
    met.ids.resize(1);
    check(api, api.getUniqueId(&met.ids.front()), info.group.name);
    return met;
  }
  const int count =
      api.commInitRankScalable == nullptr ? 1 : (info.size + ranksPerRoot - 1) / ranksPerRoot;
  const auto roots = rootsOf(info.size, count);
  auto mine = versionText(library.version());
  if (std::find(roots.begin(), roots.end(), info.rank) != roots.end()) {
    mine += newId(api, info.rank);
  }
  StoreRendezvous rendezvous(info);
  return rendezvous.run([&] {
    const MonitorRuns monitor;
    const auto answer = rendezvous.exchange(
        mine, [&](const std::vector<std::string>& said) { return gatherIds(said, roots); });
    met.ids = readIds(info, answer, roots.size());
    met.prefix = rendezvous.prefix();
    return met;
  });
}

std::unique_ptr<BlockingCall> joinOverNccl(
    const NcclApi& api,
    std::vector<ncclUniqueId> ids,
    const RendezvousInfo& info,
    c10::Device device,
    const NcclConfig& config) {
  return std::make_unique<BlockingCall>(
      api,
      device,
      [&api, ids = std::move(ids), size = info.size, rank = info.rank, config](ncclComm_t* made) {
        auto raw = config.raw(/*blocking=*/true);
        auto all = ids;
        return all.size() == 1
                   ? api.commInitRankConfig(made, size, all.front(), rank, &raw)
                   : api.commInitRankScalable(
                         made, size, rank, static_cast<int>(all.size()), all.data(), &raw);
      });
}

std::shared_ptr<Communicator> rendezvous(
    const RendezvousInfo& info,
    const std::function<std::shared_ptr<Communicator>(const Rendezvoused& met)>& make) {
  StoreRendezvous rendezvous(info);
  return rendezvous.run([&] {
    const MonitorRuns monitor;
    rendezvous.exchange("", [](const std::vector<std::string>&) { return std::string(1, kId); });
    const auto& group = info.group.name;
    const auto look = [&] {
      try {
        rendezvous.look();
      } catch (const CommError& error) {
        throw host::Failure(ncclRemoteError, reasonOf(group, error), error.failure().ranks);
      }
    };
    try {
      return make({rendezvous.peers(), rendezvous.prefix(), look});
    } catch (const host::Failure& failure) {
      rendezvous.checkRefused();
      failInit(group, failure.what(), failure.ranks);
    } catch (const std::exception&) {
      rendezvous.checkRefused();
      throw;
    }
  });
}

}  // namespace torchcomms_pg
