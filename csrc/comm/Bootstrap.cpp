#include "comm/Bootstrap.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <vector>

#include "comm/CommError.hpp"
#include "shm/Process.hpp"

namespace torchcomms_pg {

namespace {

constexpr char kRefusal = '!';  // first byte of an answer that is a reason and no id
constexpr char kId = '=';

// A store may count a timeout in coarser units and be this much early.
constexpr Milliseconds kClockTolerance{100};

// Host name and boot id: two containers may share a name, two boots a machine.
std::string hostIdentity() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return std::string(name) + "/" + boot;
}

class Rendezvous {
 public:
  explicit Rendezvous(const Meeting& meeting) : meeting_(meeting), store_(*meeting.store) {
    // The same store and name may serve one group after another, also of other
    // ranks. Every member counts its own arrivals with these members, so that
    // all agree on which group this is.
    prefix_ = "torchcomms_pg/" + keyOf(meeting.members) + "/";
    const auto generation = store_.add(prefix_ + "arrivals/" + std::to_string(meeting.rank), 1);
    prefix_ += std::to_string(generation) + "/";
  }

  // Rank 0 learns what every rank says of itself.
  std::vector<std::string> gather(const std::string& mine) {
    set(rankKey(meeting_.rank), mine);
    std::vector<std::string> all;
    if (meeting_.rank == 0) {
      for (int peer = 0; peer < meeting_.size; ++peer) {
        all.push_back(get(rankKey(peer)));
      }
    }
    return all;
  }

  void answer(const std::string& text) { set("answer", text); }

  std::string awaitAnswer() { return get("answer"); }

  const std::string& prefix() const { return prefix_; }

 private:
  std::string rankKey(int rank) const { return "rank/" + std::to_string(rank); }

  void set(const std::string& key, const std::string& value) {
    store_.set(prefix_ + key, std::vector<uint8_t>(value.begin(), value.end()));
  }

  std::string get(const std::string& key) {
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline_ - Clock::now());
    try {
      store_.wait({prefix_ + key}, std::max(left, Milliseconds(1)));
    } catch (const c10::Error& error) {
      if (deadline_ - Clock::now() > kClockTolerance) {
        throw;  // the store itself failed
      }
      throw CommError(lateRanks());
    }
    const auto value = store_.get(prefix_ + key);
    return {value.begin(), value.end()};
  }

  Failure lateRanks() {
    std::vector<int> missing;
    for (int peer = 0; peer < meeting_.size; ++peer) {
      if (!store_.check({prefix_ + rankKey(peer)})) {
        missing.push_back(peer);
      }
    }
    Failure failure;
    failure.type = c10d::ErrorType::TIMEOUT;
    failure.op = "init";
    failure.group = meeting_.group.name;
    failure.ranks = missing;
    failure.message =
        "group '" + failure.group + "' could not be set up on rank " +
        std::to_string(meeting_.rank) + " within " + inSeconds(meeting_.timeout) + ": " +
        (missing.empty() ? std::string("rank 0 did not answer")
                         : (missing.size() == 1 ? "rank " : "ranks ") + joinRanks(missing) +
                               " did not come; every rank of the group must create it");
    return failure;
  }

  const Meeting& meeting_;
  c10d::Store& store_;
  const Clock::time_point deadline_ = Clock::now() + meeting_.timeout;
  std::string prefix_;
};

// "rank 2 <what> 'a'; ranks 0, 1 <what> 'b'" where the ranks say different
// things, else empty.
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
            joinRanks(members) + " " + what + " '" + word.substr(0, word.find('/')) + "'";
  }
  return text;
}

[[noreturn]] void raise(const std::string& group, const std::string& why) {
  Failure failure;
  failure.op = "init";
  failure.group = group;
  failure.message = "group '" + group + "' could not be set up: " + why;
  throw CommError(failure);
}

void check(const NcclApi& api, ncclResult_t result, const std::string& group) {
  if (result == ncclSuccess || result == ncclInProgress) {
    return;
  }
  const std::string text = api.getLastError(nullptr);
  raise(group, text.empty() ? api.getErrorString(result) : text);
}

// A new unique id, after kId; or why there is none, after kRefusal.
std::string newId(const NcclApi& api, int rank) {
  ncclUniqueId id;
  if (api.getUniqueId(&id) != ncclSuccess) {
    return kRefusal + ("rank " + std::to_string(rank) + " could not make a unique id: ") +
           api.getLastError(nullptr);
  }
  return kId + std::string(id.internal, sizeof(id.internal));
}

// All ranks get what rank 0 answers: as many unique ids as `ids` has places, after kId; or why
// there are none, after kRefusal, which is returned.
std::string shareIds(
    Rendezvous& rendezvous,
    const Meeting& meeting,
    std::string answer,
    std::vector<ncclUniqueId>& ids) {
  if (meeting.rank == 0) {
    rendezvous.answer(answer);
  } else {
    answer = rendezvous.awaitAnswer();
  }
  if (!answer.empty() && answer.front() == kRefusal) {
    return answer.substr(1);
  }
  const size_t wanted = ids.size() * sizeof(ncclUniqueId);
  if (answer.empty() || answer.front() != kId || answer.size() - 1 != wanted) {
    raise(
        meeting.group.name,
        "rank 0's answer in the store, of " + std::to_string(answer.size()) + " bytes, is not " +
            (ids.size() == 1 ? std::string("a unique id")
                             : std::to_string(ids.size()) + " unique ids") +
            " as rank " + std::to_string(meeting.rank) +
            " wants them: all ranks need the same torchcomms_pg and the same "
            "TORCH_NCCL_RANKS_PER_ROOT, and a store that no other program writes to");
  }
  std::memcpy(ids.data(), answer.data() + 1, wanted);
  return "";
}

// Who makes the unique ids, in their order: spread over the ranks as NCCL expects it.
std::vector<int> rootsOf(int size, int count) {
  std::vector<int> roots;
  for (int i = 0; i < count; ++i) {
    roots.push_back(i * (size / count) + std::min(i, size % count));
  }
  return roots;
}

// What rank 0 answers, given what the ranks said: their versions, and after these the roots' ids.
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
         std::to_string(shm::hashBytes(name.data(), name.size()));
}

Joined joinOnHost(const NcclApi& api, const Meeting& meeting, const NcclConfig& config) {
  std::vector<ncclUniqueId> ids(1);
  std::string prefix;
  if (meeting.size == 1) {
    check(api, api.getUniqueId(&ids.front()), meeting.group.name);
  } else {
    Rendezvous rendezvous(meeting);
    const auto hosts = rendezvous.gather(hostIdentity());
    std::string answer;
    if (meeting.rank == 0) {
      answer = differences(hosts, "on host");
      answer = answer.empty() ? newId(api, 0) : kRefusal + answer;
    }
    const auto refusal = shareIds(rendezvous, meeting, std::move(answer), ids);
    if (!refusal.empty()) {
      return {nullptr, refusal, ""};
    }
    prefix = rendezvous.prefix();
  }
  return {initComm(api, std::move(ids), meeting, config), "", prefix};
}

MetOverNccl meetOverNccl(const Library& library, const Meeting& meeting, int ranksPerRoot) {
  const auto& api = library.api();
  MetOverNccl met;
  if (meeting.size == 1) {
    met.ids.resize(1);
    check(api, api.getUniqueId(&met.ids.front()), meeting.group.name);
    return met;
  }
  const int count =
      api.commInitRankScalable == nullptr ? 1 : (meeting.size + ranksPerRoot - 1) / ranksPerRoot;
  const auto roots = rootsOf(meeting.size, count);
  auto mine = versionText(library.version());
  if (std::find(roots.begin(), roots.end(), meeting.rank) != roots.end()) {
    mine += newId(api, meeting.rank);
  }
  Rendezvous rendezvous(meeting);
  const auto said = rendezvous.gather(mine);
  auto answer = meeting.rank == 0 ? gatherIds(said, roots) : "";
  met.ids.resize(roots.size());
  const auto refusal = shareIds(rendezvous, meeting, std::move(answer), met.ids);
  if (!refusal.empty()) {
    raise(meeting.group.name, refusal);
  }
  met.prefix = rendezvous.prefix();
  return met;
}

ncclComm_t initComm(
    const NcclApi& api,
    std::vector<ncclUniqueId> ids,
    const Meeting& meeting,
    const NcclConfig& config) {
  auto raw = config.raw();
  ncclComm_t comm = nullptr;
  check(
      api,
      ids.size() == 1
          ? api.commInitRankConfig(&comm, meeting.size, ids.front(), meeting.rank, &raw)
          : api.commInitRankScalable(
                &comm, meeting.size, meeting.rank, static_cast<int>(ids.size()), ids.data(), &raw),
      meeting.group.name);
  return comm;
}

std::string meet(const Meeting& meeting) {
  Rendezvous rendezvous(meeting);
  rendezvous.gather(hostIdentity());
  if (meeting.rank == 0) {
    rendezvous.answer({kId});
  } else {
    rendezvous.awaitAnswer();
  }
  return rendezvous.prefix();
}

}  // namespace torchcomms_pg
