#include "comm/Bootstrap.hpp"

#include <unistd.h>

#include <fstream>
#include <map>
#include <vector>

#include "comm/CommError.hpp"

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
    prefix_ = "torchcomms_pg/" + meeting.members + "/";
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

// Rank 0 makes the id, unless `refusal`, and all get it; or the reason why not.
std::string shareId(
    const NcclApi& api, Rendezvous& rendezvous, int rank, std::string refusal, ncclUniqueId& id) {
  if (rank == 0) {
    if (refusal.empty() && api.getUniqueId(&id) != ncclSuccess) {
      refusal = std::string("rank 0 could not make a unique id: ") + api.getLastError(nullptr);
    }
    rendezvous.answer(
        refusal.empty() ? kId + std::string(id.internal, sizeof(id.internal)) : kRefusal + refusal);
    return refusal;
  }
  const auto answer = rendezvous.awaitAnswer();
  if (answer.front() == kRefusal) {
    return answer.substr(1);
  }
  TORCH_CHECK(answer.size() == sizeof(id.internal) + 1, "init: the store holds a damaged id");
  std::copy(answer.begin() + 1, answer.end(), id.internal);
  return "";
}

}  // namespace

Joined joinOnHost(const NcclApi& api, const Meeting& meeting) {
  ncclUniqueId id;
  std::string prefix;
  if (meeting.size == 1) {
    check(api, api.getUniqueId(&id), meeting.group.name);
  } else {
    Rendezvous rendezvous(meeting);
    const auto hosts = rendezvous.gather(hostIdentity());
    auto refusal = meeting.rank == 0 ? differences(hosts, "on host") : "";
    refusal = shareId(api, rendezvous, meeting.rank, std::move(refusal), id);
    if (!refusal.empty()) {
      return {nullptr, refusal, ""};
    }
    prefix = rendezvous.prefix();
  }
  return {initComm(api, id, meeting), "", prefix};
}

MetOverNccl meetOverNccl(const Library& library, const Meeting& meeting) {
  MetOverNccl met;
  if (meeting.size == 1) {
    check(library.api(), library.api().getUniqueId(&met.id), meeting.group.name);
    return met;
  }
  Rendezvous rendezvous(meeting);
  const auto versions = rendezvous.gather(versionText(library.version()));
  auto refusal = meeting.rank == 0 ? differences(versions, "with NCCL") : "";
  if (!refusal.empty()) {
    refusal += "; all ranks must load the same version (python -m torchcomms_pg.nccl tells which)";
  }
  refusal = shareId(library.api(), rendezvous, meeting.rank, std::move(refusal), met.id);
  if (!refusal.empty()) {
    raise(meeting.group.name, refusal);
  }
  met.prefix = rendezvous.prefix();
  return met;
}

ncclComm_t initComm(const NcclApi& api, const ncclUniqueId& id, const Meeting& meeting) {
  // By the header's layout and its version: NCCL reads as much of it as it knows.
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  check(
      api,
      api.commInitRankConfig(&comm, meeting.size, id, meeting.rank, &config),
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
