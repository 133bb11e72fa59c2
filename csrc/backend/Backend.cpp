#include "backend/Backend.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <utility>

#include "base/PerProcess.hpp"
#include "comm/OpenCall.hpp"
#include "connect/Rendezvous.hpp"
#include "connect/StoreRendezvous.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

Group describeGroup(const GroupOptions& options) {
  Group group;
  group.name = options.group_name;
  group.description = options.group_desc;
  group.backend = options.backend;
  group.globalRanks.assign(
      options.global_ranks_in_group.begin(), options.global_ranks_in_group.end());
  if (!options.global_ranks_in_group.empty()) {
    c10d::getGlobalRankStartAndStride(
        options.global_ranks_in_group, group.globalRankStart, group.globalRankStride);
  }
  return group;
}

namespace {

// Groups of this process that know the processes of their ranks, by rank.
struct PeerRegistry {
  Mutex mutex;
  std::map<const Backend*, std::vector<Peer>> groups GUARDED_BY(mutex);
};
PeerRegistry& peerRegistry() {
  static PerProcess<PeerRegistry> known;
  return known.get();
}

}  // namespace

Backend::Backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    c10::intrusive_ptr<GroupOptions> options)
    : latest::Backend(rank, size),
      options_(std::move(options)),
      store_(store),
      members_(members()) {
  if (options_->enable_reconfigure) {
    start();
    return;
  }
  // Does the local setup that may fail before the rendezvous: after it the peers rely on this rank.
  observed_ = ProcessObserver::get().hold(static_cast<int>(globalRanks()[rank]));
  std::vector<Peer> peers;
  keep(connectHosts(
      {store, rank, size, describeGroup(*options_), members_, options_->timeout,
       peersOfOtherGroups()},
      options_->connectGloo, &peers));
  configure(*cpu());
  peers_ = std::move(peers);
  start();
  LockGuard lock(peerRegistry().mutex);
  peerRegistry().groups.emplace(this, peers_);
}

Backend::Backend(
    c10::intrusive_ptr<c10d::Store> store, const std::vector<CommPtr>& comms, int rank, int size,
    c10::intrusive_ptr<GroupOptions> options)
    : latest::Backend(rank, size),
      options_(std::move(options)),
      store_(std::move(store)),
      members_(members()) {
  for (const auto& comm : comms) {
    configure(*comm);
    keep(comm);
  }
  start();
}

Backend::Backend(CommPtr comm, c10::intrusive_ptr<GroupOptions> options)
    : latest::Backend(comm->rank(), comm->size()), options_(std::move(options)), borrowed_(true) {
  keep(comm);
  start();
}

bool Backend::keep(const CommPtr& comm, std::optional<uint64_t> before) {
  LockGuard lock(communicatorsMutex_);
  if (before && ends_ != *before) {
    return false;
  }
  const auto device = comm->device();
  if (device.is_cpu()) {
    cpu_ = comm;
  } else if (const auto& pair = comm->pair(); !pair.empty()) {
    const int peer = pair.front() == comm->rank() ? pair.back() : pair.front();
    pairs_[{device.index(), peer}] = comm;
  } else {
    accelerators_.push_back(comm);
  }
  return true;
}

void Backend::configure(Communicator& comm) const {
  comm.executor().setBlockingWait(options_->blockingWait);
  comm.failureState().setEndsProcess(options_->ends(comm.device()));
}

Backend::~Backend() {
  // Waits for no other rank. If a communicator was not shut down, peers that wait in it learn that
  // this rank has left. Pending completion hooks get 5 s, without the GIL.
  detach();
}

void Backend::detach() {
  forgetPeers();
  if (detached_.exchange(true)) {
    return;
  }
  for (const auto& comm : communicators()) {
    comm->groupHooks().set(nullptr, nullptr);
  }
  letObserverGo();
}

// Frees what the observer has made after the lock is released: its destructor may remove a file.
void Backend::letObserverGo() {
  std::shared_ptr<void> last;
  LockGuard lock(observedMutex_);
  last.swap(observed_);
}

// Returns the processes of this group's ranks, by rank, as far as they are known from other groups
// of the same store that have not failed. With these, the rendezvous notices a rank's death even
// before the rank arrives. Empty if torch did not pass the global ranks.
std::vector<Peer> Backend::peersOfOtherGroups() const {
  if (options_->global_ranks_in_group.empty()) {
    return {};
  }
  const auto underlying = [](const c10::intrusive_ptr<c10d::Store>& store) {
    auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
    return prefixed == nullptr ? store.get() : prefixed->getUnderlyingNonPrefixStore().get();
  };
  std::map<int64_t, Peer> known;
  std::vector<CommPtr> looked;  // may be the last references: dropped after the lock is released
  {
    LockGuard lock(peerRegistry().mutex);
    for (const auto& [other, theirs] : peerRegistry().groups) {
      looked.push_back(other->cpu());
      if (underlying(other->store_) != underlying(store_) || looked.back()->failureState().get()) {
        continue;
      }
      const auto ranks = other->globalRanks();
      for (size_t i = 0; i < theirs.size(); ++i) {
        known[ranks[i]] = theirs[i];
      }
    }
  }
  if (known.empty()) {
    return {};
  }
  std::vector<Peer> peers;
  for (const auto rank : globalRanks()) {
    peers.push_back(known[rank]);
  }
  return peers;
}

void Backend::forgetPeers() {
  LockGuard lock(peerRegistry().mutex);
  peerRegistry().groups.erase(this);
}

void Backend::start() {
  enableNanCheck(options_->nanCheck);
  setGroupUid(options_->group_name);
  init();
  logOptions();
  auto observed = ProcessObserver::get().hold(static_cast<int>(globalRanks()[getRank()]));
  LockGuard lock(observedMutex_);
  observed_ = std::move(observed);
}

// Logs the options with the names and units of ProcessGroupNCCL, which readers of logs know.
void Backend::logOptions() const {
  const auto does = [](bool ends) { return ends ? "ends the process" : "raises"; };
  const auto& ends = options_->endsProcess;
  LOG(INFO) << "torchcomms_pg initialization options: size: " << getSize()
            << ", global rank: " << globalRanks()[getRank()]
            << ", TIMEOUT(ms): " << options_->timeout.count()
            << ", USE_HIGH_PRIORITY_STREAM: " << options_->accelerator.highPriority
            << ", PG Name: " << options_->group_name << ", ranks: " << members()
            << ", NAN_CHECK: " << options_->nanCheck
            << ", BLOCKING_WAIT: " << options_->blockingWait << ", a failure on CPU tensors "
            << does(ends.value_or(false)) << ", on an accelerator "
            << does(ends.value_or(options_->acceleratorEnds));
}

void Backend::prepare(const char* what) const {
  process_.check(options_->group_name);
  TORCH_CHECK(
      store_ == nullptr || cpu() != nullptr, what, ": group '", options_->group_name,
      "' has no members yet, as it was created with enable_reconfigure; call reconfigure first");
  if (C10_UNLIKELY(!recorded_.load(std::memory_order_acquire))) {
    std::call_once(recording_, [this] {
      for (const auto& comm : communicators()) {
        record(*comm);
      }
      recorded_.store(true, std::memory_order_release);
    });
  }
  TORCH_CHECK(
      !detached_.load(std::memory_order_relaxed), "group '", options_->group_name,
      "' has been shut down; create a new one");
}

void Backend::record(Communicator& comm) const {
  comm.setDescription(getGroupDesc());
  if (auto recorder = process_recorder::get()) {
    comm.recorders().add(std::move(recorder));
  }
}

Backend::CommPtr Backend::cpu() const {
  LockGuard lock(communicatorsMutex_);
  return cpu_;
}

Backend::CommPtr Backend::cpuCommunicator(const char* what) const {
  prepare(what);
  auto comm = cpu();
  TORCH_CHECK(
      comm != nullptr, what, ": group '", options_->group_name,
      "' was made of a communicator for tensors of another device than the CPU; move the tensor "
      "there");
  return comm;
}

Backend::CommPtr Backend::route(const char* what, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), what, ": the tensor is undefined");
  return communicator(what, tensor.device());
}

std::vector<Backend::CommPtr> Backend::communicators() const {
  std::vector<CommPtr> all;
  if (!process_.isThis()) {
    return all;
  }
  LockGuard lock(communicatorsMutex_);
  if (cpu_) {
    all.push_back(cpu_);
  }
  all.insert(all.end(), accelerators_.begin(), accelerators_.end());
  for (const auto& [place, comm] : pairs_) {
    all.push_back(comm);
  }
  return all;
}

Backend::CommPtr Backend::find(at::Device device, std::optional<int> peer) const {
  // The pair's communicator comes first: both ranks have it, even if only one of them has since
  // made the communicator of all ranks.
  if (peer) {
    if (const auto found = pairs_.find({device.index(), *peer}); found != pairs_.end()) {
      return found->second;
    }
  }
  const auto found = std::ranges::find_if(
      accelerators_, [&](const CommPtr& comm) { return comm->device() == device; });
  return found == accelerators_.end() ? nullptr : *found;
}

Backend::CommPtr Backend::communicator(
    const char* what, at::Device device, std::optional<int> peer) {
  if (device.is_cpu()) {
    return cpuCommunicator(what);
  }
  checkCarried(what, options_->group_name, device);
  TORCH_CHECK_VALUE(
      device.has_index(), what, ": device ", device, " has no index; pass e.g. ", device, ":0");
  prepare(what);
  const auto known = [&] {
    LockGuard lock(communicatorsMutex_);
    return find(device, peer);
  };
  if (auto comm = known()) {
    return comm;
  }
  const auto before = ends_.load();
  const auto creating = holdCreation(what);
  if (auto comm = known()) {
    return comm;
  }
  TORCH_CHECK(!closed_.load(), what, ": group '", options_->group_name, "' has been shut down");
  TORCH_CHECK_VALUE(
      store_ != nullptr, what, ": the tensor is on ", device, ", and the communicator that group '",
      options_->group_name, "' was made of serves ", communicators().front()->device(),
      "; move the tensor there");
  return newCommunicator(device, peer, before);
}

// Not analysed: clang 19 takes the mutex of a returned lock for one that is never released.
LongLock::Held Backend::holdCreation(const char* what, bool hurry) NO_THREAD_SAFETY_ANALYSIS {
  return LongLock::Held(
      creation_,
      [&] {
        OpenCall::refuseIn(
            describeGroup(*options_), getRank(), "the first operation on an accelerator", what);
      },
      [&] {
        if (hurry) {
          ++ends_;
        }
      });
}

Backend::CommPtr Backend::routeMessage(const char* what, const at::Tensor& tensor, int peer) {
  // The messages of a batch are one operation, which may involve several ranks.
  const bool alone = tensor.defined() && !tensor.is_cpu() && getSize() > 2 && peer >= 0 &&
                     peer < getSize() && peer != getRank() && !inBatch();
  return alone ? communicator(what, tensor.device(), peer) : route(what, tensor);
}

bool Backend::inBatch() {
  LockGuard lock(batchMutex_);
  return batches_.contains(threadLife());
}

Backend::CommPtr Backend::newCommunicator(
    at::Device device, std::optional<int> peer, uint64_t before) {
  auto store = c10::make_intrusive<c10d::PrefixStore>("accelerator", store_);
  const auto proceed = [&] {
    if (ends_ != before) {
      failInit(
          options_->group_name,
          "the group was ended on rank " + std::to_string(getRank()) +
              " while its ranks were joining, by the handler of a signal or by another thread",
          {getRank()});
    }
  };
  const RendezvousInfo info{
      .store = store,
      .rank = getRank(),
      .size = getSize(),
      .group = describeGroup(*options_),
      .members = members_,
      .timeout = options_->timeout,
      .known = peers_,
      .peer = peer.value_or(-1),
      .proceed = proceed};
  auto comm = connect(info, device, options_->accelerator);
  configure(*comm);
  if (!keep(comm, before)) {
    comm->retire("the end of the group");
    proceed();
  }
  adopt(*comm);
  LockGuard lock(batchMutex_);
  if (batches_.contains(threadLife())) {
    comm->batches().start();
  }
  return comm;
}

std::string Backend::members() const {
  std::string text;
  for (const auto rank : globalRanks()) {
    text += (text.empty() ? "" : ",") + std::to_string(rank);
  }
  return text;
}

std::vector<int64_t> Backend::globalRanks() const {
  return describeGroup(*options_).ranks(getSize());
}

uint64_t Backend::getSequenceNumberForGroup() {
  uint64_t issued = 0;
  for (const auto& comm : communicators()) {
    issued += comm->sequenceNumber();
  }
  return issued;
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(
      timeout.count() > 0, "set_timeout: timeout must be positive, got ", timeout.count(), " ms");
  options_->timeout = timeout;
  for (const auto& comm : communicators()) {
    comm->setTimeout(timeout);
  }
}

void Backend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& comm : communicators()) {
    comm->inFlight().lengthen(timeout);
  }
}

bool Backend::isInitialized() {
  // A communicator that failed before all ranks arrived will never be initialized: returns false,
  // as a query must not raise.
  const auto all = communicators();
  return !all.empty() && std::all_of(all.begin(), all.end(), [](const CommPtr& comm) {
    try {
      return comm->joining().initialized();
    } catch (const std::exception&) {
      return false;
    }
  });
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  communicator("eager connect", device);  // on the CPU the ranks have already joined
}

Backend::CommPtr Backend::accelerator() const {
  LockGuard lock(communicatorsMutex_);
  if (accelerators_.empty()) {
    return nullptr;
  }
  if (accelerators_.size() == 1) {
    return accelerators_.front();
  }
  const auto type = accelerators_.front()->device().type();
  return find(c10::impl::VirtualGuardImpl(type).getDevice(), std::nullopt);
}

int64_t Backend::commPtr() {
  prepare("comm_ptr");
  const auto comm = accelerator();
  TORCH_CHECK(
      comm != nullptr, "comm_ptr: group '", options_->group_name,
      "' has no communicator of the current accelerator yet; run one operation of the group on a "
      "tensor of the device, or pass device_id to init_process_group");
  return reinterpret_cast<int64_t>(comm->joining().handle());
}

void Backend::enableCollectivesTiming() {
  timing_.store(true, std::memory_order_relaxed);
  for (const auto& comm : communicators()) {
    comm->enableTiming();
  }
}

void Backend::adopt(Communicator& comm) {
  if (timing_.load(std::memory_order_relaxed)) {
    comm.enableTiming();
  }
  installHooks(comm);
  record(comm);
}

void Backend::waitForPendingWorks() {
  process_.check(options_->group_name);
  for (const auto& comm : communicators()) {
    comm->drain();
    comm->hooks()->drain();
  }
  std::shared_ptr<WorkerStream> hooks;
  {
    LockGuard lock(hooksMutex_);
    hooks = completionHooks_;
  }
  if (hooks) {
    hooks->drain();
  }
}

c10d::ErrorType Backend::getError() {
  for (const auto& comm : communicators()) {
    if (const auto failure = comm->failureState().get()) {
      return failure->type;
    }
  }
  return c10d::ErrorType::SUCCESS;
}

void Backend::abort() {
  ++ends_;
  const auto all = communicators();
  for (const auto& comm : all) {
    comm->failureState().failBy("abort()");
  }
  for (const auto& comm : all) {
    comm->failureState().awaitHooks();
  }
}

void Backend::shutdown() {
  if (borrowed_) {
    detach();
    return;
  }
  closed_ = true;
  ++ends_;
  std::exception_ptr first;
  forgetPeers();
  for (const auto& comm : communicators()) {
    try {
      comm->close();
    } catch (...) {
      first = first ? first : std::current_exception();
    }
  }
  letObserverGo();
  if (first) {
    std::rethrow_exception(first);
  }
}

}  // namespace torchcomms_pg
