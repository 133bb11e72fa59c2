#include "gloo/Comm.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "shm/api/Api.hpp"
#include "shm/api/Handles.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Makes a link between some ranks of the group. `name`: prefix of the link's keys in the store.
std::shared_ptr<Link> newLink(
    const Members& members, const std::shared_ptr<GroupFailure>& groupFailure,
    const std::string& name, const std::vector<int>& ranks) {
  const auto rank = std::ranges::find(ranks, members.topology->rank) - ranks.begin();
  std::vector<std::string> names;
  for (const int member : ranks) {
    names.push_back(members.topology->nameOf(member));
  }
  return Link::make(
      {members.connect, members.store, name, groupFailure, ranks, std::move(names),
       static_cast<int>(rank)});
}

}  // namespace

Comm::Comm(Members members)
    : members_(std::move(members)),
      inside_(shm::findHandle(members_.inside, "newComm")),
      groupFailure_(
          std::make_shared<GroupFailure>(
              members_.store, members_.topology->rank,
              [topology = members_.topology, died = members_.died](int rank) {
                const auto how = died(rank);
                return how.empty() ? "" : topology->nameOf(rank) + " " + how;
              })) {
  std::vector<std::string> names;
  for (const int rank : topology().inside()) {
    names.push_back(topology().nameOf(rank));
  }
  inside_->segment().nameRanks(std::move(names));
}

Comm::~Comm() {
  close();
}

std::shared_ptr<Comm> Comm::make(
    Members members, Connected connected, const std::function<void()>& look) {
  std::shared_ptr<Comm> comm(new Comm(std::move(members)));
  // A failure of the group releases this host's ranks that wait in shared memory. A failure in
  // shared memory becomes the group's failure.
  comm->groupFailure_->watch(
      comm,
      {.release =
           [raw = comm.get()] {
             const auto failure = *raw->groupFailure_->known();
             raw->inside_->fail({failure.result, host::encode(failure, shm::kFailureBytes), {}});
           },
       .learn =
           [raw = comm.get()](bool first) {
             const auto& segment = raw->inside_->segment();
             if (first) {
               raw->ring(1);
             }
             if (!raw->groupFailure_->known() && segment.failed()) {
               raw->groupFailure_->adopt(segment.failure(), raw->topology().inside());
             }
           }});
  comm->connectRail(connected, look);
  comm->messages_ = std::make_shared<Messages>(Messages::Ways{
      .topology = comm->members_.topology,
      .inside = comm->inside_,
      .rail = comm->rail_,
      .newLink = [members = comm->members_, groupFailure = comm->groupFailure_](
                     const auto& name,
                     const auto& ranks) { return newLink(members, groupFailure, name, ranks); },
      .groupFailure = comm->groupFailure_});
  comm->groupFailure_->watch(
      comm->messages_, {.release = [raw = comm->messages_.get()] { raw->wake(); }});
  return comm;
}

void Comm::connectRail(Connected connected, const std::function<void()>& look) {
  const auto& t = topology();
  if (!t.onRail(t.rank) || t.hosts.size() == 1) {
    return;
  }
  std::vector<int> counterparts;
  for (const auto& members : t.hosts) {
    counterparts.push_back(members[t.local()]);
  }
  rail_ = newLink(members_, groupFailure_, "rail/" + std::to_string(t.local()), counterparts);
  if (connected == Connected::now) {
    rail_->connect(members_.timeout, look);
  }
}

void Comm::execute(uint64_t place, const std::function<void()>& body) {
  // Lets the next collective execute, even if `body` raises.
  struct Turn {
    shm::TicketLock& ticketLock;
    const uint64_t ticket;
    ~Turn() { ticketLock.pass(ticket); }
  };
  try {
    turns_.await(place, inside_->segment());
    const Turn turn{turns_, place};
    if (rail_ != nullptr && !rail_->connected()) {
      rail_->awaitConnections();
    }
    body();
  } catch (const host::NcclError& failure) {
    groupFailure_->raiseFor(failure, topology().inside());
  }
}

void Comm::checkInside(ncclResult_t result) const {
  if (result != ncclSuccess) {
    const auto& segment = inside_->segment();
    throw segment.failed() ? segment.failure()
                           : host::NcclError(result, shm::library().getLastError(members_.inside));
  }
}

void Comm::completeLater(std::shared_ptr<Transfer> transfer) {
  waiters_.enqueue([self = shared_from_this(), transfer = std::move(transfer)] {
    self->waiters_.handOver();  // lets later messages complete in another thread
    ncclResult_t result = ncclSuccess;
    try {
      self->messages_->complete({transfer});
    } catch (const host::NcclError& failure) {
      result = failure.result;
    } catch (const std::exception& error) {
      self->groupFailure_->fail({ncclInternalError, error.what(), {}});
      result = ncclInternalError;
    }
    transfer->done(transfer->context, result, transfer->partner);
  });
}

Comm::Child Comm::split(int color, int key, uint64_t place) {
  struct Choice {
    int color;
    int key;
    int rank;
  };
  const auto& t = topology();
  std::vector<Choice> choices(t.size);
  const Choice mine{color, key, t.rank};
  const Collective c{CollectiveKind::split, &mine, choices.data(), sizeof(Choice), ncclInt8};
  ncclComm_t inside = nullptr;
  execute(place, [&] {
    runHere(c, place);
    // The ranks of one host that have the same color still share memory, ordered as in the child.
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;  // commSplit returns when all these ranks have joined
    checkInside(shm::library().commSplit(members_.inside, color, key, &inside, &config));
  });
  if (color == NCCL_SPLIT_NOCOLOR) {
    return {};
  }
  std::erase_if(choices, [color](const Choice& choice) { return choice.color != color; });
  std::ranges::stable_sort(choices, {}, &Choice::key);
  const auto position = std::ranges::find(choices, t.rank, &Choice::rank) - choices.begin();
  std::vector<std::string> places, names;
  for (const auto& choice : choices) {
    places.push_back(std::to_string(t.hostOf[choice.rank]));
    if (!t.names.empty()) {
      names.push_back(t.names[choice.rank]);
    }
  }
  auto topology = Topology::of(places, names, static_cast<int>(position));
  if (topology->hosts.size() == 1) {
    return {nullptr, inside};
  }
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      "split/" + std::to_string(place) + "/" + std::to_string(color), members_.store);
  return {
      make(
          {store, std::move(topology), inside, members_.connect, members_.timeout,
           [died = members_.died, choices](int rank) { return died(choices[rank].rank); }},
          Connected::now),
      nullptr};
}

std::vector<int> Comm::missingRanks() const {
  if (const auto failure = groupFailure_->known()) {
    return failure->ranks;
  }
  if (rail_ != nullptr) {
    auto absent = rail_->missingRanks();
    if (!absent.empty()) return absent;
  }
  auto absent = inside_->missingRanks();
  for (int& rank : absent) {
    rank = topology().inside()[rank];
  }
  return absent;
}

std::function<void()> Comm::probe(Announcements by) {
  groupFailure_->announceBy(std::move(by));
  return [groupFailure = groupFailure_, rail = rail_, messages = messages_] {
    if (groupFailure->known()) {
      return;
    }
    try {
      groupFailure->inStore([&](c10d::Store& group) {
        if (groupFailure->failAsOthers(group)) {
          return;
        }
        groupFailure->answer(group);
        if (rail != nullptr) {
          rail->lookForOthers(group);
        }
        messages->lookForOthers(group);
      });
    } catch (const std::exception&) {
      // The store is gone. The reason of a failure may arrive over this rank's connections, and
      // other ranks of this host need it.
      groupFailure->awaitReason({}, /*ask=*/false);
      throw;
    }
  };
}

uint64_t Comm::ring(uint64_t times) {
  return shm::library().ring(members_.inside, times);
}

void Comm::close() {
  if (closed_.exchange(true)) {
    return;
  }
  groupFailure_->awaitTold();
  if (rail_ != nullptr) {
    rail_->close();
  }
  if (messages_ != nullptr) {
    messages_->close();
  }
  if (groupFailure_->known()) {
    shm::library().commAbort(members_.inside);
  } else {
    shm::library().commDestroy(members_.inside);
  }
}

}  // namespace torchcomms_pg::gloo
