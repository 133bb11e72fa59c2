#include "backend/Backend.hpp"

#include <algorithm>
#include <utility>

#include "comm/Bootstrap.hpp"
#include "device/HostDevice.hpp"
#include "recorder/ProcessRecorder.hpp"
#include "shm/Api.hpp"

namespace torchcomms_pg {

namespace {

Group describeGroup(const GroupOptions& options) {
  Group group;
  group.name = options.group_name;
  group.description = options.group_desc;
  group.globalRanks.assign(
      options.global_ranks_in_group.begin(), options.global_ranks_in_group.end());
  if (!options.global_ranks_in_group.empty()) {
    c10d::getGlobalRankStartAndStride(
        options.global_ranks_in_group, group.globalRankStart, group.globalRankStride);
  }
  return group;
}

}  // namespace

Backend::Backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<GroupOptions> options)
    : c10d::Backend(rank, size), options_(std::move(options)) {
  const auto joined = joinOnHost(
      shm::api(), *store, rank, size, options_->group_name, members(), options_->timeout);
  if (joined.comm == nullptr) {
    // A group of GPUs on several hosts may never see a CPU tensor.
    cpuUnavailable_ = joined.unavailable;
  } else {
    cpu_ = std::make_shared<Communicator>(
        shm::api(),
        joined.comm,
        rank,
        size,
        describeGroup(*options_),
        options_->timeout,
        std::make_unique<HostDevice>());
  }
  start();
}

Backend::Backend(
    std::shared_ptr<Communicator> comm,
    int rank,
    int size,
    c10::intrusive_ptr<GroupOptions> options)
    : c10d::Backend(rank, size), options_(std::move(options)), cpu_(std::move(comm)) {
  start();
}

Backend::Backend(std::shared_ptr<Communicator> comm, c10::intrusive_ptr<GroupOptions> options)
    : c10d::Backend(comm->rank(), comm->size()),
      options_(std::move(options)),
      cpu_(std::move(comm)),
      borrowed_(true) {
  start();
}

Backend::~Backend() {
  // Nothing that could block: a communicator that was not shut down leaves
  // its peers, who are told so if they wait for it.
  detach();
}

void Backend::detach() {
  if (cpu_ && !detached_.exchange(true)) {
    cpu_->setEndHook(nullptr);
    cpu_->setFailureHook(nullptr);
  }
}

void Backend::start() {
  setGroupUid(options_->group_name);
  init();
}

void Backend::startRecording() const {
  std::call_once(recording_, [this] {
    cpu_->setDescription(getGroupDesc());
    if (auto recorder = process_recorder::get()) {
      cpu_->record(std::move(recorder));
    }
    recorded_.store(true, std::memory_order_release);
  });
}

const std::shared_ptr<Communicator>& Backend::cpuCommunicator(const char* what) const {
  TORCH_CHECK(
      cpu_ != nullptr,
      what,
      ": CPU tensors of group '",
      options_->group_name,
      "' go through shared memory, and its ranks are on different hosts: ",
      cpuUnavailable_,
      ". Use backend 'cpu:gloo,cuda:torchcomms' there");
  if (C10_UNLIKELY(!recorded_.load(std::memory_order_acquire))) {
    startRecording();
  }
  TORCH_CHECK(
      !detached_.load(std::memory_order_relaxed),
      "group '",
      options_->group_name,
      "' has been shut down; create a new one");
  return cpu_;
}

Communicator& Backend::route(const char* what, const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(tensor.defined(), what, ": the tensor is undefined");
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu(),
      what,
      ": the tensor is on ",
      tensor.device(),
      ", and group '",
      options_->group_name,
      "' communicates CPU tensors; move it with tensor.to('cpu'), or for CUDA tensors use the "
      "backend 'cpu:torchcomms,cuda:nccl', which needs a GPU, its driver and a torch with NCCL");
  return *cpuCommunicator(what);
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
  TORCH_CHECK_TYPE(
      ours != nullptr,
      what,
      ": the options are not torchcomms_pg.Backend.Options; make them with "
      "torchcomms_pg.Backend.Options()");
  return c10::make_intrusive<GroupOptions>(*ours);
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
  // The members meet through the store, not by ncclCommSplit: that needs the
  // other ranks too, and torch calls split on those once for each device type
  // of the group, but on members once for each backend.
  auto meeting = c10::make_intrusive<c10d::PrefixStore>("split/" + options->group_name, store);
  return c10::make_intrusive<Backend>(
      meeting,
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
  auto child = cpuCommunicator("shrink")->shrink(
      gone, (flags & NCCL_SHRINK_ABORT) != 0, describeGroup(*options), options->timeout);
  const int rank = child->rank();
  const int size = child->size();
  return c10::intrusive_ptr<Backend>::unsafe_steal_from_new(
      new Backend(std::move(child), rank, size, std::move(options)));
}

c10::intrusive_ptr<c10d::Backend> Backend::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts,
    const int& rank,
    const int& size) {
  auto options = childOptions(opts, "merge");
  if (options->global_ranks_in_group.size() != static_cast<size_t>(size)) {
    options->global_ranks_in_group.clear();  // those of the smaller group
  }
  return c10::make_intrusive<Backend>(store, rank, size, std::move(options));
}

uint64_t Backend::getSequenceNumberForGroup() {
  return cpuCommunicator("get_sequence_number_for_group")->sequenceNumber();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(
      timeout.count() > 0, "set_timeout: timeout must be positive, got ", timeout.count(), " ms");
  options_->timeout = timeout;
  if (cpu_) {
    cpu_->setTimeout(timeout);
  }
}

void Backend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  if (cpu_) {
    cpu_->addEphemeralTimeout(timeout);
  }
}

bool Backend::isInitialized() {
  return cpu_ && cpu_->initialized();
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  TORCH_CHECK_VALUE(
      device.is_cpu(),
      "eager connect: group '",
      options_->group_name,
      "' communicates tensors on cpu, got device_id ",
      device);
  cpuCommunicator("eager connect");  // the ranks have met already
}

void Backend::enableCollectivesTiming() {
  if (cpu_) {
    cpu_->enableTiming();
  }
}

void Backend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  std::lock_guard lock(hooksMutex_);
  TORCH_CHECK(
      completionHooks_ == nullptr,
      "register_on_completion_hook: group '",
      options_->group_name,
      "' has one already; a group takes one");
  onCompletionHook_ = hook;  // what hasHooks() looks at
  completionHooks_ = std::make_shared<CallbackThread>();
  installEndHook();
  enableCollectivesTiming();
}

void Backend::installEndHook() {
  if (cpu_ == nullptr) {
    return;  // nothing that could end
  }
  cpu_->setEndHook([thread = completionHooks_,
                    onCompletion = onCompletionHook_
#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
                    ,
                    hooks = hooksOfCompletion_
#endif
  ](const Operation& op,
                   [[maybe_unused]] Work* work,
                   Clock::time_point started,
                   Clock::time_point finished) {
    if (onCompletion) {
      thread->add([onCompletion,
                   info = std::make_shared<c10d::WorkInfo>(
                       opType(op.kind), op.seq, started, finished, finished - started)] {
        onCompletion(info);
      });
    }
#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
    if (work == nullptr || !work->isSuccess()) {
      return;  // these hooks tell of works, and of those that succeeded
    }
    c10d::CompletionHookArgs args;
    args.completionKey = work->getCompletionKey();
    if (started != Clock::time_point{}) {
      args.duration_ms = std::chrono::duration<float, std::milli>(finished - started).count();
    }
    for (const auto& [id, hook] : hooks) {
      hook(args);
    }
#endif
  });
}

void Backend::waitForPendingWorks() {
  if (cpu_) {
    cpu_->drain();
  }
  if (completionHooks_) {
    completionHooks_->drain();
  }
}

c10d::ErrorType Backend::getError() {
  return cpu_ ? cpu_->error() : c10d::ErrorType::SUCCESS;
}

void Backend::abort() {
  if (cpu_) {
    cpu_->abort("abort()");
  }
}

void Backend::shutdown() {
  if (borrowed_) {
    detach();
  } else if (cpu_) {
    cpu_->close();
  }
}

#if TORCHCOMMS_PG_TORCH_AT_LEAST(15)
void Backend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  std::lock_guard lock(hooksMutex_);
  hooksOfCompletion_[id] = std::move(hook);
  installEndHook();
}

void Backend::unregisterCompletionHook(int64_t id) {
  std::lock_guard lock(hooksMutex_);
  hooksOfCompletion_.erase(id);
  installEndHook();
}
#endif

#if TORCHCOMMS_PG_TORCH_AT_LEAST(14)
void Backend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  std::lock_guard lock(hooksMutex_);
  abortHooks_[id] = std::move(hook);
  installAbortHooks();
}

void Backend::unregisterAbortHook(int64_t id) {
  std::lock_guard lock(hooksMutex_);
  abortHooks_.erase(id);
  installAbortHooks();
}

void Backend::installAbortHooks() {
  if (cpu_ == nullptr) {
    return;  // nothing that could fail
  }
  cpu_->setFailureHook([hooks = abortHooks_] {
    for (const auto& [id, hook] : hooks) {
      hook();
    }
  });
}
#endif

}  // namespace torchcomms_pg
