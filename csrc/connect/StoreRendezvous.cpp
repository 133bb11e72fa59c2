#include "connect/StoreRendezvous.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>

#include "base/StoreValue.hpp"
#include "base/TextStreams.hpp"
#include "base/Thread.hpp"
#include "host/Interrupt.hpp"

namespace torchcomms_pg {

namespace {

// Intervals at which a waiting rank calls look(): while it waits for a key of the store, and while
// the library joins the ranks.
constexpr Milliseconds kLook{250};
constexpr Milliseconds kLookWhileJoining{50};

// The longest interval at which a rank polls the library during the join is this value times the
// number of ranks, which share the host's cores, but at least kFirstPoll.
constexpr std::chrono::microseconds kJoiningPollOfRank{10};
constexpr std::chrono::microseconds kFirstPoll{200};

// Interval at which a rank polls for an event that it expects within moments.
constexpr Milliseconds kSoon{20};

// Longest time from a rank's decision on a round until that rank has stored the answer.
constexpr Milliseconds kWriting{1000};

// Key of the number of the last round in which all ranks met.
constexpr const char* kMet = "met";

// Keys of each round: the answer, the number of ranks that have tried to decide the round, and the
// number of ranks that have read the answer.
constexpr const char* kAnswer = "answer";
constexpr const char* kDecided = "decided";
constexpr const char* kRead = "read";

// Returns the rank with which the writer of `text` wants to connect, or -1 if it wants all ranks or
// `text` does not say.
int wantedIn(const std::string& text) {
  TextReader said(text.substr(std::min(text.find('\n'), text.size())));
  int rank = -1;
  return said >> rank ? rank : -1;
}

std::string introduction(const std::string& group) {
  return "group '" + group + "' could not be set up: ";
}

}  // namespace

void failInit(const std::string& group, const std::string& why, std::vector<int> ranks) {
  throw CommError(
      {.message = introduction(group) + why,
       .op = "init",
       .group = group,
       .ranks = std::move(ranks)});
}

std::string reasonOf(const std::string& group, const std::exception& error) {
  std::string text = error.what();
  if (const auto* const failure = dynamic_cast<const CommError*>(&error)) {
    text = failure->failure().message;
  } else if (const auto* const raised = dynamic_cast<const c10::Error*>(&error)) {
    text = raised->what_without_backtrace();
  }
  const auto known = introduction(group);
  return text.starts_with(known) ? text.substr(known.size()) : text;
}

std::string differences(
    const std::vector<std::string>& said, const std::string& what, const std::vector<int>& pair) {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    ranks[said[rank]].push_back(pair.empty() ? static_cast<int>(rank) : pair[rank]);
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

StoreRendezvous::StoreRendezvous(const RendezvousInfo& info)
    : info_(info),
      store_(*info.store),
      ranks_(std::max<int64_t>(info.size, static_cast<int64_t>(info.group.hosts.size()))),
      deadline_(Clock::now() + info.timeout),
      home_("torchcomms_pg/" + keyOf(info.members) + "/"),
      peers_(info.known),
      heard_(info.size, false),
      seen_(info.size, false),
      versions_(info.rank == 0 ? info.size : 0) {
  peers_.resize(info.size);
  reachingStore([&] {
    met_ = store_.add(home_ + kMet, 0);
    enter(met_ + 1);
    while (over()) {
      enter(round_ + 1);
    }
  });
}

void StoreRendezvous::enter(int64_t round) {
  round_ = round;
  said_ = false;
  heard_.assign(info_.size, false);
  prefix_ = home_ + std::to_string(round) + "/";
}

bool StoreRendezvous::over() {
  const auto answer = value(kAnswer);
  // A refusal must fail every rank once, even a late one. So for this rank a refused round is over
  // only if this rank has written its own key in it.
  return answer && (answer->front() != kRefusal || value(rankKey(info_.rank)));
}

host::NcclError StoreRendezvous::blame(const std::exception& error) const {
  auto reason = reasonOf(info_.group.name, error);
  const std::vector<int> self{info_.rank};
  const auto* const failure = dynamic_cast<const CommError*>(&error);
  auto ranks = failure == nullptr ? self : failure->failure().ranks;
  if (!known_ && ranks == self) {
    reason = info_.nameOf(info_.rank) + " cannot join: " + reason;
  }
  return {ncclRemoteError, reason, std::move(ranks)};
}

void StoreRendezvous::raiseStoreGone(const c10::Error& error) {
  known_ = true;  // the peers notice themselves that the store is gone
  // A process that is ending closes its connections a moment before it counts as dead.
  for (const auto until = Clock::now() + kLook; Clock::now() < until;) {
    if (const int dead = deadPeer(); dead >= 0) {
      raiseDied(dead);
    }
    std::this_thread::sleep_for(kSoon);
  }
  const std::string text = error.what_without_backtrace();
  failInit(
      info_.group.name,
      "the store in which the ranks meet is gone (" + text.substr(0, text.find('\n')) +
          "): the process that serves it, which is rank 0's or the launcher's, has ended, or the "
          "network to it is down");
}

std::string StoreRendezvous::exchange(
    const std::string& mine, const Judge& judge, const Judge& judgePair) {
  mine_ = mine;
  judgePair_ = judgePair;
  if (self_.startTime == 0) {
    failInit(
        info_.group.name, std::string("/proc/self/stat cannot be read: ") + strerror(errno),
        {info_.rank});
  }
  auto answer = meet(mine, judge);
  for (; !answer.empty(); answer = meet(mine, judge)) {
    if (answer.front() == kPair) {
      std::vector<int> pair(2);
      TextReader(answer.substr(1)) >> pair.front() >> pair.back();
      if (std::ranges::count(pair, info_.rank) > 0) {
        pair_ = pair;
        answer = answer.substr(answer.find('|') + 1);
        break;
      }
    } else if (answer.front() == kGivenUp) {
      for (int peer = 0; peer < info_.size; ++peer) {
        seen_[peer] = seen_[peer] || value(rankKey(peer));
      }
    } else {
      break;
    }
    enter(round_ + 1);
  }
  if (answer.empty()) {
    raiseDamaged(answer);
  }
  if (answer.front() == kRefusal) {
    raiseRefused(answer);
  }
  if (!pair_.empty()) {
    peers_[info_.rank] = self_;
    for (const int rank : pair_) {
      if (rank != info_.rank && !heard_[rank]) {
        hear(rank, value(rankKey(rank)).value());
      }
    }
    return answer;
  }
  size_t begin = 1;
  const Peer* previous = nullptr;
  for (auto& peer : peers_) {
    const auto end = answer.find('\n', begin);
    if (end == std::string::npos) {
      raiseDamaged(answer);
    }
    peer = Peer::parse(answer.substr(begin, end - begin), previous);
    previous = &peer;
    begin = end + 1;
  }
  heard_.assign(info_.size, true);
  allMet_ = true;
  if (info_.rank != 0) {
    forget();
  }
  return answer.front() + answer.substr(begin);
}

void StoreRendezvous::raiseDamaged(const std::string& answer) {
  failInit(
      info_.group.name,
      "rank 0's answer in the store, of " + std::to_string(answer.size()) +
          " bytes, is damaged: all ranks need the same torchcomms_pg, and a store that no other "
          "program writes to");
}

void StoreRendezvous::forget() {
  // If this raises, the store cannot delete keys, or is gone and keeps none.
  attempt([&] {
    // Before all ranks have counted themselves, another rank may still read any key.
    if (store_.add(prefix_ + kRead, 1) != info_.size) {
      return;
    }
    for (int rank = 0; rank < info_.size; ++rank) {
      store_.deleteKey(prefix_ + rankKey(rank));
    }
    for (const auto* const key : {kAnswer, kDecided, kRead}) {
      store_.deleteKey(prefix_ + key);
    }
  });
}

std::string StoreRendezvous::meet(const std::string& mine, const Judge& judge) {
  set(rankKey(info_.rank), kId + self_.text() + " " + TORCHCOMMS_PG_VERSION + "\n" +
                               std::to_string(info_.peer) + "\n" + mine);
  said_ = true;
  if (info_.rank != 0) {
    return await(kAnswer);
  }
  std::vector<std::string> said;
  for (int peer = 0; peer < info_.size; ++peer) {
    const auto text = await(rankKey(peer));
    if (text.front() == kGivenUp || text.front() == kPair) {
      return text;
    }
    said.push_back(hear(peer, text));
  }
  auto answer = differentVersions();
  answer = answer.empty() ? judge(said) : refusal(answer);
  if (answer.front() == kRefusal) {
    return decide(answer);
  }
  std::string all(1, answer.front());
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    all += peers_[peer].text(peer == 0 ? nullptr : &peers_[peer - 1]) + "\n";
  }
  // Stored before the answer: after the last reader has deleted the answer, kMet alone keeps ranks
  // from entering this round again.
  store_.add(home_ + kMet, round_ - met_);
  met_ = round_;
  return decide(all + answer.substr(1));
}

std::string StoreRendezvous::meetPair() {
  const int peer = info_.peer;
  if (peer <= info_.rank) {
    return "";
  }
  const auto text = value(rankKey(peer));
  if (!text || text->front() != kId || wantedIn(*text) != info_.rank) {
    return "";
  }
  const auto said = judgePair_({mine_, hear(peer, *text)});
  return decide(kPair + std::to_string(info_.rank) + " " + std::to_string(peer) + "|" + said);
}

std::string StoreRendezvous::decide(const std::string& answer) {
  if (store_.add(prefix_ + kDecided, 1) == 1) {
    set(kAnswer, answer);
    return answer;
  }
  for (const auto end = Clock::now() + kWriting; Clock::now() < end;) {
    if (auto decided = value(kAnswer)) {
      return *std::move(decided);
    }
    std::this_thread::sleep_for(kSoon);
  }
  return std::string(1, kGivenUp);  // the rank that decided first has died or is stopped
}

void StoreRendezvous::awaitJoined(const Library& library, ncclComm_t comm) {
  auto poll = kFirstPoll;
  for (auto next = Clock::now() + kLookWhileJoining;; poll += poll / 4) {
    ncclResult_t state = ncclSuccess;
    const auto asked = library.commGetAsyncError(comm, &state);
    state = asked == ncclSuccess ? state : asked;
    if (state == ncclSuccess) {
      return;
    }
    if (state != ncclInProgress) {
      look();
      return;  // later calls raise the communicator's failure
    }
    if (const auto now = Clock::now(); now >= next) {
      next = now + std::max<Clock::duration>(kLookWhileJoining, StorePauses::longestOf(ranks_));
      look();
      if (now >= deadline_) {
        known_ = true;
        throw CommError(lateRanks(library.missingRanks(comm)));
      }
    }
    poll = std::min(poll, std::max(kFirstPoll, info_.size * kJoiningPollOfRank));
    std::this_thread::sleep_for(poll);
  }
}

void StoreRendezvous::checkRefused() {
  if (const auto refusal = value("refused")) {
    raiseRefused(*refusal);
  }
}

void StoreRendezvous::look() {
  if (host::interrupted()) {
    std::rethrow_exception(host::takeInterrupt());
  }
  if (info_.proceed) {
    info_.proceed();
  }
  // Rank 0 reads the values of all ranks. The other ranks read rank 0's value, and learn of all
  // ranks from its answer.
  for (int peer = 0; peer < (info_.rank == 0 ? info_.size : 1); ++peer) {
    if (heard_[peer]) {
      continue;
    }
    if (const auto text = value(rankKey(peer))) {
      hear(peer, *text);
    }
  }
  const int dead = deadPeer();
  checkRefused();  // first, since a rank that has read a refusal may have ended
  if (dead >= 0) {
    raiseDied(dead);
  }
}

int StoreRendezvous::deadPeer() const {
  for (int peer = 0; peer < info_.size; ++peer) {
    const bool needed = info_.peer < 0 || peer == info_.peer;
    if (needed && peers_[peer].sameHost(self_) && peers_[peer].dead()) {
      return peer;
    }
  }
  return -1;
}

void StoreRendezvous::raiseDied(int peer) {
  const auto text = info_.nameOf(peer) + " (pid " + std::to_string(peers_[peer].pid) + ") died";
  tell({ncclRemoteError, text, {peer}});
  failInit(info_.group.name, text, {peer});
}

void StoreRendezvous::set(const std::string& key, const std::string& value) {
  store_.set(prefix_ + key, std::vector<uint8_t>(value.begin(), value.end()));
}

std::optional<std::string> StoreRendezvous::value(const std::string& key) {
  auto found = valueOf(store_, prefix_ + key);
  if (found && found->empty()) {
    failInit(
        info_.group.name, "the store's key '" + prefix_ + key +
                              "' is empty: the ranks need a store that no other program writes to");
  }
  return found;
}

void StoreRendezvous::tell(const host::NcclError& error) noexcept {
  known_ = true;
  attempt([&] {  // if this raises, the store is gone, which the other ranks also notice
    const auto text = refusal(error.what(), error.ranks);
    if (!said_) {
      set(rankKey(info_.rank), text);
    }
    decide(text);
    if (info_.rank == 0) {
      set(kAnswer, text);  // replaces an answer that some ranks have not read yet
    }
    set("refused", text);
  });
}

void StoreRendezvous::raiseRefused(const std::string& text) {
  known_ = true;
  const auto told =
      host::decode(text.substr(1)).value_or(host::NcclError(ncclRemoteError, text.substr(1)));
  failInit(info_.group.name, told.what(), told.ranks);
}

std::string StoreRendezvous::hear(int peer, const std::string& text) {
  if (text.front() == kRefusal) {
    // Passes on what the peer has written in place of its value.
    if (info_.rank == 0) {
      set(kAnswer, text);
    }
    raiseRefused(text);
  }
  const auto end = text.find('\n');
  const auto line = text.substr(1, end - 1);
  peers_[peer] = Peer::parse(line);
  if (info_.rank == 0) {
    versions_[peer] = line.substr(line.rfind(' ') + 1);
  }
  heard_[peer] = true;
  const auto wanted = text.find('\n', end + 1);
  return wanted == std::string::npos ? "" : text.substr(wanted + 1);
}

std::string StoreRendezvous::differentVersions() const {
  std::vector<std::string> versions;
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    versions.push_back(versions_[rank] + "' on host '" + peers_[rank].host);
  }
  return std::ranges::count(versions_, versions_.front()) == info_.size
             ? ""
             : differences(versions, "with torchcomms_pg") +
                   "; install the same version on all hosts";
}

std::string StoreRendezvous::await(const std::string& key) {
  auto next = Clock::now() + kLook;
  for (StorePauses pauses(ranks_);; pauses.next()) {
    if (auto found = value(key)) {
      return *std::move(found);
    }
    const auto now = Clock::now();
    if (now >= deadline_) {
      known_ = true;
      auto answer = decide(std::string(1, kGivenUp));
      if (answer.front() != kGivenUp) {
        return answer;
      }
      throw CommError(lateRanks());
    }
    if (now >= next) {
      look();
      if (auto answer = value(kAnswer)) {
        return *std::move(answer);
      }
      if (auto answer = meetPair(); !answer.empty()) {
        return answer;
      }
      next = Clock::now() + std::max<Clock::duration>(kLook, StorePauses::longestOf(ranks_));
    }
  }
}

Failure StoreRendezvous::lateRanks(std::vector<int> missing) {
  std::vector<int> gone;
  const bool all = std::ranges::count(heard_, false) == 0;
  for (int peer = 0; !all && peer < info_.size; ++peer) {
    if (!value(rankKey(peer))) {
      (seen_[peer] ? gone : missing).push_back(peer);
    }
  }
  for (auto* const ranks : {&missing, &gone}) {
    if (std::ranges::count(*ranks, info_.peer) > 0) {
      *ranks = {info_.peer};  // the only rank that this rank needs
    }
  }
  auto why =
      "group '" + info_.group.name + "' could not be set up on " + info_.nameOf(info_.rank) +
      " within " + inSeconds(info_.timeout) + ": " +
      (!missing.empty() ? info_.namesOf(missing) + (all ? " did not join the others of the host"
                                                        : " did not come; every rank of the group "
                                                          "must create it")
       : !gone.empty()  ? info_.namesOf(gone) + " gave up waiting before all ranks had come"
       : all            ? std::string("not all ranks have joined")
                        : info_.nameOf(0) + " did not answer");
  return {
      .type = c10d::ErrorType::TIMEOUT,
      .message = std::move(why),
      .op = "init",
      .group = info_.group.name,
      .ranks = missing.empty() ? gone : missing};
}

}  // namespace torchcomms_pg
