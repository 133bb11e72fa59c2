#include "backend/Backend.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/Leaked.hpp"
#include "comm/Rendezvous.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

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

// Groups of this process that know the processes of their ranks. A group may outlive the statics.
struct Acquaintances {
  std::mutex mutex;
  std::set<const Backend*> groups;
};
Acquaintances& acquaintances() {
  static auto& known = leaked<Acquaintances>();
  return known;
}

}  // namespace

Backend::Backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<GroupOptions> options)
    : latest::Backend(rank, size),
      options_(std::move(options)),
      store_(store),
      members_(members()) {
  if (options_->enable_reconfigure) {
    start();
    return;
  }
  // Does first what can fail alone: after the rendezvous the others count on this rank.
  dumpPipe_ = DumpPipe::hold(static_cast<int>(globalRanks()[rank]));
  std::vector<Peer> peers;
  cpu_ = connectHosts(
      {store,
       rank,
       size,
       describeGroup(*options_),
       members_,
       options_->timeout,
       peersOfOtherGroups()},
      options_->connectGloo,
      &peers);
  cpu()->failureState().setEndsProcess(options_->ends(cpu()->device()));
  peers_ = std::move(peers);
  start();
  std::lock_guard lock(acquaintances().mutex);
  acquaintances().groups.insert(this);
}

Backend::Backend(
    c10::intrusive_ptr<c10d::Store> store,
    const std::vector<CommPtr>& comms,
    int rank,
    int size,
    c10::intrusive_ptr<GroupOptions> options)
    : latest::Backend(rank, size),
      options_(std::move(options)),
      store_(std::move(store)),
      members_(members()) {
  for (const auto& comm : comms) {
    comm->executor().setBlockingWait(options_->blockingWait);
    comm->failureState().setEndsProcess(options_->ends(comm->device()));
    keep(comm);
  }
  start();
}

Backend::Backend(CommPtr comm, c10::intrusive_ptr<GroupOptions> options)
    : latest::Backend(comm->rank(), comm->size()), options_(std::move(options)), borrowed_(true) {
  keep(std::move(comm));
  start();
}

void Backend::keep(CommPtr comm) {
  const auto device = comm->device();
  if (device.is_cpu()) {
    cpu_ = std::move(comm);
    return;
  }
  std::lock_guard lock(acceleratorsMutex_);
  accelerators_[device.index()] = std::move(comm);
}

Backend::~Backend() {
  // Does nothing that could block: a communicator that was not shut down leaves its peers, who are
  // told so if they wait for it.
  detach();
}

void Backend::detach() {
  forgetPeers();
  if (detached_.exchange(true)) {
    return;
  }
  for (const auto& comm : communicators()) {
    comm->groupHooks().setEnd(nullptr);
    comm->groupHooks().setFailed(nullptr);
  }
  dumpPipe_.store(nullptr);
}

// Returns the processes of this group's ranks, by rank, as far as other groups without a failure
// know them through the same store: so the death of a rank is noticed also where it has not come
// yet. Empty where torch has not told the global ranks.
std::vector<Peer> Backend::peersOfOtherGroups() const {
  if (options_->global_ranks_in_group.empty()) {
    return {};
  }
  const auto underlying = [](const c10::intrusive_ptr<c10d::Store>& store) {
    auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
    return prefixed == nullptr ? store.get() : prefixed->getUnderlyingNonPrefixStore().get();
  };
  std::map<int64_t, Peer> known;
  {
    std::lock_guard lock(acquaintances().mutex);
    for (const auto* const other : acquaintances().groups) {
      if (underlying(other->store_) != underlying(store_) || other->cpu()->failureState().get()) {
        continue;
      }
      const auto ranks = other->globalRanks();
      for (size_t i = 0; i < other->peers_.size(); ++i) {
        known[ranks[i]] = other->peers_[i];
      }
    }
  }
  std::vector<Peer> peers;
  if (known.empty()) {
    return peers;
  }
  for (const auto rank : globalRanks()) {
    peers.push_back(known[rank]);
  }
  return peers;
}

void Backend::forgetPeers() {
  std::lock_guard lock(acquaintances().mutex);
  acquaintances().groups.erase(this);
}

void Backend::start() {
  enableNanCheck(options_->nanCheck);
  setGroupUid(options_->group_name);
  init();
  dumpPipe_ = DumpPipe::hold(static_cast<int>(globalRanks()[getRank()]));
}

void Backend::prepare(const char* what) const {
  TORCH_CHECK(
      store_ == nullptr || cpu() != nullptr,
      what,
      ": group '",
      options_->group_name,
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
      !detached_.load(std::memory_order_relaxed),
      "group '",
      options_->group_name,
      "' has been shut down; create a new one");
}

void Backend::record(Communicator& comm) const {
  comm.setDescription(getGroupDesc());
  if (auto recorder = process_recorder::get()) {
    comm.recorders().add(std::move(recorder));
  }
}

Backend::CommPtr Backend::cpuCommunicator(const char* what) const {
  prepare(what);
  auto comm = cpu();
  TORCH_CHECK(
      comm != nullptr,
      what,
      ": group '",
      options_->group_name,
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
  if (auto comm = cpu()) {
    all.push_back(std::move(comm));
  }
  std::lock_guard lock(acceleratorsMutex_);
  for (const auto& [index, comm] : accelerators_) {
    all.push_back(comm);
  }
  return all;
}

Backend::CommPtr Backend::communicator(const char* what, at::Device device) {
  if (device.is_cpu()) {
    return cpuCommunicator(what);
  }
  checkCarried(what, options_->group_name, device);
  TORCH_CHECK_VALUE(
      device.has_index(), what, ": device ", device, " has no index; pass e.g. ", device, ":0");
  prepare(what);
  const auto find = [&]() -> CommPtr {
    std::lock_guard lock(acceleratorsMutex_);
    const auto found = accelerators_.find(device.index());
    return found == accelerators_.end() ? nullptr : found->second;
  };
  if (auto comm = find()) {
    return comm;
  }
  std::lock_guard creating(creationMutex_);
  if (auto comm = find()) {
    return comm;
  }
  TORCH_CHECK(!closed_.load(), what, ": group '", options_->group_name, "' has been shut down");
  TORCH_CHECK_VALUE(
      store_ != nullptr,
      what,
      ": the tensor is on ",
      device,
      ", and the communicator that group '",
      options_->group_name,
      "' was made of serves ",
      communicators().front()->device(),
      "; move the tensor there");
  return newCommunicator(device);
}

Backend::CommPtr Backend::newCommunicator(at::Device device) {
  auto store = c10::make_intrusive<c10d::PrefixStore>("accelerator", store_);
  const RendezvousInfo info{
      store, getRank(), getSize(), describeGroup(*options_), members_, options_->timeout};
  auto comm = connect(info, device, options_->accelerator);
  comm->executor().setBlockingWait(options_->blockingWait);
  comm->failureState().setEndsProcess(options_->ends(comm->device()));
  keep(comm);
  adopt(*comm);
  std::lock_guard lock(batchMutex_);
  if (batches_.count(std::this_thread::get_id()) > 0) {
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
  std::vector<int64_t> ranks(
      options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end());
  for (int rank = static_cast<int>(ranks.size()); rank < getSize(); ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

c10::intrusive_ptr<GroupOptions> Backend::childOptions(
    const c10::intrusive_ptr<c10d::Backend::Options>& opts, const char* what) const {
  if (opts == nullptr) {
    return c10::make_intrusive<GroupOptions>(*options_);
  }
  const auto ours = c10::dynamic_intrusive_pointer_cast<GroupOptions>(opts);
  if (ours == nullptr && options_->backend != kBackendName) {  // options of Gloo
    auto options = c10::make_intrusive<GroupOptions>(*options_);
    options->timeout = opts->timeout;
    return options;
  }
  TORCH_CHECK_TYPE(
      ours != nullptr,
      what,
      ": the options are not torchcomms_pg.Backend.Options; make them with "
      "torchcomms_pg.Backend.Options()");
  auto options = c10::make_intrusive<GroupOptions>(*ours);
  options->connectGloo = options_->connectGloo;
  if (!options->endsProcess) {
    options->endsProcess = options_->endsProcess;
  }
  options->acceleratorEnds = options_->acceleratorEnds;
  options->accelerator.ranksPerRoot = options_->accelerator.ranksPerRoot;
  if (options->accelerator.library.folder.empty()) {
    options->accelerator.library = options_->accelerator.library;
  }
  return options;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  auto options = childOptions(opts, "split");
  options->global_ranks_in_group.clear();
  const auto global = globalRanks();
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(
        rank >= 0 && rank < getSize(),
        "split: rank ",
        rank,
        " is not a rank of this group, wanted 0 to ",
        getSize() - 1);
    options->global_ranks_in_group.push_back(static_cast<uint64_t>(global[rank]));
  }
  ++splits_;
  const auto position = std::find(ranks.begin(), ranks.end(), getRank());
  if (position == ranks.end()) {
    return nullptr;
  }
  // The members find each other through the store, not by ncclCommSplit: that needs the other ranks
  // too, each as often as the members, and torch does not see to it. It calls split on them once
  // for each device type of the group, but on members once for each backend, and says of two calls
  // neither that they are one split nor that they are not. new_group leaves them out with
  // use_local_synchronization.
  auto info = c10::make_intrusive<c10d::PrefixStore>("split/" + keyOf(options->group_name), store);
  return c10::make_intrusive<Backend>(
      info,
      static_cast<int>(position - ranks.begin()),
      static_cast<int>(ranks.size()),
      std::move(options));
}

c10::intrusive_ptr<c10d::Backend> Backend::shrink(
    const std::vector<int64_t>& excluded,
    int flags,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  auto options = childOptions(opts, "shrink");
  const auto global = globalRanks();
  const std::vector<int> gone(excluded.begin(), excluded.end());
  options->global_ranks_in_group.clear();
  for (int rank = 0; rank < getSize(); ++rank) {
    if (std::find(gone.begin(), gone.end(), rank) == gone.end()) {
      options->global_ranks_in_group.push_back(static_cast<uint64_t>(global[rank]));
    }
  }
  prepare("shrink");
  std::vector<CommPtr> children;
  for (const auto& comm : communicators()) {
    children.push_back(comm->shrink(
        gone, (flags & NCCL_SHRINK_ABORT) != 0, describeGroup(*options), options->timeout));
  }
  const int rank = children.front()->rank();
  const int size = children.front()->size();
  c10::intrusive_ptr<c10d::Store> store;  // null: this group has none either
  if (store_ != nullptr) {
    store = c10::make_intrusive<c10d::PrefixStore>("shrunk/" + keyOf(options->group_name), store_);
  }
  return c10::intrusive_ptr<Backend>::unsafe_steal_from_new(
      new Backend(std::move(store), children, rank, size, std::move(options)));
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts,
    const int& rank,
    const int& size) {
  auto options = childOptions(opts, "merge");
  if (options->global_ranks_in_group.size() != static_cast<size_t>(size)) {
    options->global_ranks_in_group.clear();  // the list is the smaller group's
  }
  auto merged = c10::make_intrusive<Backend>(store, rank, size, std::move(options));
  merged->forgetPeers();  // its ranks are not those of its store
  return merged;
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
  for (const auto& comm : communicators()) {
    if (comm->initialized()) {
      return true;
    }
  }
  return false;
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  communicator("eager connect", device);  // CPU: the ranks have joined already
}

Backend::CommPtr Backend::accelerator() const {
  std::lock_guard lock(acceleratorsMutex_);
  if (accelerators_.empty()) {
    return nullptr;
  }
  if (accelerators_.size() == 1) {
    return accelerators_.begin()->second;
  }
  const auto type = accelerators_.begin()->second->device().type();
  const auto found = accelerators_.find(c10::impl::VirtualGuardImpl(type).getDevice().index());
  return found == accelerators_.end() ? nullptr : found->second;
}

int64_t Backend::commPtr() {
  prepare("comm_ptr");
  const auto comm = accelerator();
  TORCH_CHECK(
      comm != nullptr,
      "comm_ptr: group '",
      options_->group_name,
      "' has no communicator of the current accelerator yet; run one operation of the group on a "
      "tensor of the device, or pass device_id to init_process_group");
  return reinterpret_cast<int64_t>(comm->handle());
}

uint64_t Backend::nextUid() {
  static std::atomic<uint64_t> next{0};
  return next++;
}

void Backend::enableCollectivesTiming() {
  timing_.store(true, std::memory_order_relaxed);
  for (const auto& comm : communicators()) {
    comm->enableTiming();
  }
}

void Backend::enableNanCheck(bool enable) {
  std::lock_guard lock(hooksMutex_);
  nanCheck_ = enable;
  if (enable) {
    for (const auto& comm : communicators()) {
      installNanCheck(*comm);
    }
    return;
  }
  for (const auto& [hooks, id] : std::exchange(nanChecks_, {})) {
    if (const auto there = hooks.lock()) {
      there->remove(id);
    }
  }
}

void Backend::installNanCheck(Communicator& comm) {
  const auto& hooks = comm.hooks();
  std::erase_if(nanChecks_, [&](const auto& known) {
    if (known.first.lock() != hooks) {
      return false;
    }
    hooks->remove(known.second);  // the former communicator's, which may have had another rank
    return true;
  });
  const auto id =
      hooks->add(Hooks::Pre([rank = comm.rank()](const auto& args) { refuseNan(*args, rank); }));
  nanChecks_.emplace_back(hooks, id);
}

void Backend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  std::lock_guard lock(hooksMutex_);
  TORCH_CHECK(
      completionHooks_ == nullptr,
      "register_on_completion_hook: group '",
      options_->group_name,
      "' has one already; a group takes one");
  onCompletionHook_ = hook;  // hasHooks() looks at it
  completionHooks_ = std::make_shared<CallbackThread>();
  for (const auto& comm : communicators()) {
    installEndHook(*comm);
  }
  enableCollectivesTiming();
}

void Backend::adopt(Communicator& comm) {
  if (timing_.load(std::memory_order_relaxed)) {
    comm.enableTiming();
  }
  installHooks(comm);
  record(comm);
}

void Backend::installHooks(Communicator& comm) {
  std::lock_guard lock(hooksMutex_);
  installEndHook(comm);
  if (nanCheck_) {
    installNanCheck(comm);
  }
  installAbortHooks(comm);
}

void Backend::installEndHook(Communicator& comm) const {
  if (!onCompletionHook_ && hooksOfCompletion_.empty()) {
    comm.groupHooks().setEnd(nullptr);
    return;
  }
  comm.groupHooks().setEnd(
      [thread = completionHooks_, onCompletion = onCompletionHook_, hooks = hooksOfCompletion_](
          const Operation& op, Work* work, Clock::time_point started, Clock::time_point finished) {
        if (onCompletion) {
          thread->add([onCompletion,
                       info = std::make_shared<c10d::WorkInfo>(
                           traits(op.kind).type, op.seq, started, finished, finished - started)] {
            onCompletion(info);
          });
        }
        if (work == nullptr || !work->isSuccess()) {
          return;  // these hooks are for works that have succeeded
        }
        latest::CompletionHookArgs args;
        args.completionKey = work->getCompletionKey();
        if (started != Clock::time_point{}) {
          args.duration_ms = std::chrono::duration<float, std::milli>(finished - started).count();
        }
        for (const auto& [id, hook] : hooks) {
          hook(args);
        }
      });
}

void Backend::waitForPendingWorks() {
  for (const auto& comm : communicators()) {
    comm->drain();
  }
  if (completionHooks_) {
    completionHooks_->drain();
  }
}

c10d::ErrorType Backend::getError() {
  for (const auto& comm : communicators()) {
    if (const auto error = comm->failureState().type(); error != c10d::ErrorType::SUCCESS) {
      return error;
    }
  }
  return c10d::ErrorType::SUCCESS;
}

void Backend::abort() {
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
  std::exception_ptr first;
  forgetPeers();
  for (const auto& comm : communicators()) {
    try {
      comm->close();
    } catch (...) {
      first = first ? first : std::current_exception();
    }
  }
  dumpPipe_.store(nullptr);
  if (first) {
    std::rethrow_exception(first);
  }
}

}  // namespace torchcomms_pg
