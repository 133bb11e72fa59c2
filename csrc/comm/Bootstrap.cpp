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

std::string hostName(const std::string& identity) {
  return identity.substr(0, identity.find('/'));
}

class Rendezvous {
 public:
  Rendezvous(
      c10d::Store& store,
      int rank,
      int size,
      const std::string& group,
      const std::string& members,
      Milliseconds timeout)
      : store_(store), rank_(rank), size_(size), group_(group), timeout_(timeout) {
    // The same store and name may serve one group after another, also of other
    // ranks. Every member counts its own arrivals with these members, so that
    // all agree on which group this is.
    prefix_ = "torchcomms_pg/" + members + "/";
    const auto generation = store_.add(prefix_ + "arrivals/" + std::to_string(rank_), 1);
    prefix_ += std::to_string(generation) + "/";
  }

  // Rank 0 learns where all ranks are; the others say where they are.
  std::vector<std::string> gatherHosts() {
    set(hostKey(rank_), hostIdentity());
    std::vector<std::string> hosts;
    if (rank_ == 0) {
      for (int peer = 0; peer < size_; ++peer) {
        hosts.push_back(get(hostKey(peer)));
      }
    }
    return hosts;
  }

  void answer(const std::string& text) { set("answer", text); }

  std::string awaitAnswer() { return get("answer"); }

  const std::string& prefix() const { return prefix_; }

 private:
  std::string hostKey(int rank) const { return "host/" + std::to_string(rank); }

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
    for (int peer = 0; peer < size_; ++peer) {
      if (!store_.check({prefix_ + hostKey(peer)})) {
        missing.push_back(peer);
      }
    }
    Failure failure;
    failure.type = c10d::ErrorType::TIMEOUT;
    failure.op = "init";
    failure.group = group_;
    failure.ranks = missing;
    failure.message =
        "group '" + group_ + "' could not be set up on rank " + std::to_string(rank_) + " within " +
        inSeconds(timeout_) + ": " +
        (missing.empty() ? std::string("rank 0 did not answer")
                         : (missing.size() == 1 ? "rank " : "ranks ") + joinRanks(missing) +
                               " did not come; every rank of the group must create it");
    return failure;
  }

  c10d::Store& store_;
  const int rank_;
  const int size_;
  const std::string& group_;
  const Milliseconds timeout_;
  const Clock::time_point deadline_ = Clock::now() + timeout_;
  std::string prefix_;
};

// Why these hosts cannot share memory; empty when they are one.
std::string refusal(const std::vector<std::string>& hosts) {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    ranks[hosts[rank]].push_back(static_cast<int>(rank));
  }
  if (ranks.size() == 1) {
    return "";
  }
  std::string text;
  for (const auto& [host, members] : ranks) {
    text += (text.empty() ? "" : "; ") + std::string(members.size() == 1 ? "rank " : "ranks ") +
            joinRanks(members) + " on host '" + hostName(host) + "'";
  }
  return text;
}

void check(const NcclApi& api, ncclResult_t result, const std::string& group) {
  if (result == ncclSuccess || result == ncclInProgress) {
    return;
  }
  Failure failure;
  failure.op = "init";
  failure.group = group;
  failure.message = "group '" + group + "' could not be set up: " + api.getLastError(nullptr);
  throw CommError(failure);
}

}  // namespace

Joined joinOnHost(
    const NcclApi& api,
    c10d::Store& store,
    int rank,
    int size,
    const std::string& group,
    const std::string& members,
    Milliseconds timeout) {
  ncclUniqueId id;
  if (size == 1) {
    check(api, api.getUniqueId(&id), group);
  } else {
    Rendezvous rendezvous(store, rank, size, group, members, timeout);
    const auto hosts = rendezvous.gatherHosts();
    if (rank == 0) {
      const auto reason = refusal(hosts);
      if (!reason.empty()) {
        rendezvous.answer(kRefusal + reason);
        return {nullptr, reason};
      }
      check(api, api.getUniqueId(&id), group);
      rendezvous.answer(kId + std::string(id.internal, sizeof(id.internal)));
    } else {
      const auto answer = rendezvous.awaitAnswer();
      if (answer.front() == kRefusal) {
        return {nullptr, answer.substr(1)};
      }
      TORCH_CHECK(answer.size() == sizeof(id.internal) + 1, "init: the store holds a damaged id");
      std::copy(answer.begin() + 1, answer.end(), id.internal);
    }
  }
  Joined joined;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  check(api, api.commInitRankConfig(&joined.comm, size, id, rank, &config), group);
  return joined;
}

std::string meet(
    c10d::Store& store,
    int rank,
    int size,
    const std::string& group,
    const std::string& members,
    Milliseconds timeout) {
  Rendezvous rendezvous(store, rank, size, group, members, timeout);
  rendezvous.gatherHosts();
  if (rank == 0) {
    rendezvous.answer({kId});
  } else {
    rendezvous.awaitAnswer();
  }
  return rendezvous.prefix();
}

}  // namespace torchcomms_pg
