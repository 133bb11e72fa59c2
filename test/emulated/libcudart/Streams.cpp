#include "libcudart/Streams.hpp"

#include <array>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libcudart/Calls.hpp"
#include "libcudart/Captures.hpp"
#include "libcudart/Devices.hpp"
#include "libcudart/Emulated.hpp"

namespace emulated {

namespace {

std::atomic<uint64_t> streamsMade{0};

// Streams are never freed: their threads may be inside a task, and a handle
// that was destroyed must not come to mean another stream.
struct Streams {
  std::mutex mutex;
  std::unordered_map<cudaStream_t, Stream*> alive;
  std::array<Stream*, kDevices> legacy{};
  std::atomic<bool> legacyUsed{false};
};

Streams& streams() {
  static auto* const instance = new Streams;
  return *instance;
}

// Those of a device that are or were in use.
std::vector<Stream*> streamsOf(int device) {
  std::vector<Stream*> all;
  const std::lock_guard lock(streams().mutex);
  for (const auto& [handle, stream] : streams().alive) {
    if (stream->device() == device) all.push_back(stream);
  }
  return all;
}

std::atomic<bool> faulty{false};

thread_local Stream* redirected = nullptr;

// Runs a task; what it raises is the device's fault.
void runTask(const std::function<void()>& task) {
  if (faulty.load(std::memory_order_relaxed)) return;
  try {
    task();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "emulated: a kernel has failed: %s\n", error.what());
    faulty.store(true);
  }
}

}  // namespace

Stream::Stream(int device, unsigned flags, int priority, bool legacy)
    : device_(device),
      flags_(flags),
      priority_(priority),
      legacy_(legacy),
      dawdler_(++streamsMade * 31 + static_cast<uint64_t>(device)),
      worker_("gpu" + std::to_string(device) + "." + std::to_string(streamsMade.load())) {}

cudaError_t Stream::queue(std::function<void()> task) {
  if (redirected != nullptr) {
    redirected->add(std::move(task));
    return cudaSuccess;
  }
  if (const auto error = refuseImplicit(*this, "a kernel in the default stream")) return error;
  if (capturing.load(std::memory_order_acquire)) return addNode(*this, {.run = std::move(task)});
  add(std::move(task));
  return deviceFault();
}

void Stream::enqueue(std::function<void()> task) {
  queue(std::move(task));
}

bool Stream::capture(const std::function<void()>& issue) {
  if (redirected != nullptr || !capturing.load(std::memory_order_acquire)) return false;
  addNode(*this, {.issue = issue});
  return true;
}

void Stream::add(std::function<void()> task, bool delayed) {
  orderWithLegacy();
  post(std::move(task), delayed);
}

// Programming Guide, "Default Stream", and Runtime API, "Stream synchronization
// behavior": the legacy stream waits for all blocking streams, and they for it.
void Stream::orderWithLegacy() {
  const bool blocking = (flags_ & cudaStreamNonBlocking) == 0;
  if (!blocking || !streams().legacyUsed.load(std::memory_order_acquire)) return;
  for (auto* const other : streamsOf(device_)) {
    const bool ordered = other != this && (other->flags_ & cudaStreamNonBlocking) == 0 &&
                         (legacy_ || other->legacy_) && !other->idle();
    if (!ordered) continue;
    auto mark = std::make_shared<simulated::Mark>();
    other->post([mark] { mark->set(); }, /*delayed=*/false);
    post([this, mark] { wait_.during(mark, [&] { mark->wait(); }); }, /*delayed=*/false);
  }
}

void Stream::post(std::function<void()> task, bool delayed) {
  pending_.fetch_add(1, std::memory_order_relaxed);
  worker_.enqueue([this, task = std::move(task), delayed]() mutable {
    if (delayed) dawdler_.dawdle();
    runTask(std::exchange(task, nullptr));
    const std::lock_guard lock(mutex_);
    simulated::tasksEnded.fetch_add(1);
    pending_.fetch_sub(1, std::memory_order_release);
    done_.notify_all();
  });
}

MarkPtr Stream::record() {
  auto mark = std::make_shared<simulated::Mark>();
  add([mark] { mark->set(); }, /*delayed=*/false);
  return mark;
}

void Stream::wait(MarkPtr mark) {
  add([this, mark = std::move(mark)] { wait_.during(mark, [&] { mark->wait(); }); },
      /*delayed=*/false);
}

cudaError_t Stream::queueHost(std::function<void()> function) {
  if (capturing.load()) return queue(std::move(function));  // its replays may be in other streams
  return queue([this, function = std::move(function)] {
    wait_.during(std::make_shared<simulated::Mark>(), function);
  });
}

void Stream::synchronize() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return idle(); });
}

Stream* findStream(cudaStream_t handle) {
  auto& all = streams();
  const std::lock_guard lock(all.mutex);
  if (handle == nullptr || handle == cudaStreamLegacy) {
    auto*& stream = all.legacy[currentDevice()];
    if (stream == nullptr) {
      stream = new Stream(currentDevice(), cudaStreamDefault, 0, /*legacy=*/true);
      all.alive[stream->handle()] = stream;
      all.legacyUsed.store(true, std::memory_order_release);
    }
    return stream;
  }
  const auto found = all.alive.find(handle);
  return found == all.alive.end() ? nullptr : found->second;
}

void synchronizeDevice(int device) {
  for (auto* const stream : streamsOf(device)) stream->synchronize();
}

cudaError_t deviceFault() {
  return faulty.load(std::memory_order_relaxed)
             ? failed(cudaErrorLaunchFailure, "a kernel has failed before")
             : cudaSuccess;
}

Redirect::Redirect(Stream& to) {
  redirected = &to;
}

Redirect::~Redirect() {
  redirected = nullptr;
}

cudaError_t queueKernel(cudaStream_t stream, std::function<void()> kernel) {
  auto* const self = findStream(stream);
  if (self == nullptr) return failed(cudaErrorInvalidResourceHandle, "the stream of a kernel");
  needContext("a kernel");
  return self->queue(std::move(kernel));
}

torchcomms_pg::host::HostStream* hostStream(cudaStream_t stream) {
  return findStream(stream);
}

}  // namespace emulated

using namespace emulated;

namespace {

cudaError_t create(cudaStream_t* handle, unsigned flags, int priority, const char* function) {
  calledDriver(function);
  needContext(function);
  auto* const stream = new Stream(currentDevice(), flags, priority);
  const std::lock_guard lock(streams().mutex);
  *handle = stream->handle();
  streams().alive[*handle] = stream;
  return cudaSuccess;
}

cudaError_t notAStream(const char* function) {
  return failed(cudaErrorInvalidResourceHandle, function);
}

}  // namespace

EMULATED_API void emulatedSetDelays(uint64_t seed, double probability, int64_t longest) {
  simulated::setDelays({seed, probability, std::chrono::microseconds(longest)});
}

// Returns whether all streams are at rest: see simulated/Rest.hpp.
EMULATED_API int emulatedSettled() {
  std::vector<Stream*> all;
  for (int device = 0; device < kDevices; ++device) {
    for (auto* const stream : streamsOf(device)) all.push_back(stream);
  }
  return simulated::atRest(all) ? 1 : 0;
}

// ---------------------------------------------------------------- Runtime API, "Stream Management"

EMULATED_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create(stream, cudaStreamDefault, 0, __func__);
}

EMULATED_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create(stream, flags, 0, __func__);
}

EMULATED_API cudaError_t
cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create(stream, flags, priority, __func__);
}

// "In case the device is still doing work in the stream when cudaStreamDestroy() is
// called, the function will return immediately".
EMULATED_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  calledDriver(__func__);
  if (unloading()) return failed(cudaErrorCudartUnloading, __func__);
  const std::lock_guard lock(streams().mutex);
  return streams().alive.erase(handle) != 0 ? cudaSuccess : notAStream(__func__);
}

EMULATED_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  called(__func__);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return notAStream(__func__);
  *priority = stream->priority();
  return cudaSuccess;
}

EMULATED_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  calledDriver(__func__);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return notAStream(__func__);
  if (const auto error = refuseCaptured(*stream, __func__)) return error;
  if (const auto error = refuseUnsafe(__func__)) return error;
  if (!stream->idle()) return failed(cudaErrorNotReady, __func__);
  return deviceFault();
}

EMULATED_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  calledDriver(__func__);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return notAStream(__func__);
  if (const auto error = refuseCaptured(*stream, __func__)) return error;
  if (const auto error = refuseUnsafe(__func__)) return error;
  stream->synchronize();
  return deviceFault();
}

// "cudaErrorStreamCaptureUnsupported": also while any stream of the device captures
// (Programming Guide, "Prohibited and Unhandled Operations").
EMULATED_API cudaError_t cudaDeviceSynchronize() {
  calledDriver(__func__);
  needContext(__func__);
  if (const auto error = refuseUnsafe(__func__)) return error;
  for (auto* const stream : streamsOf(currentDevice())) {
    if (const auto error = refuseCaptured(*stream, __func__)) return error;
  }
  synchronizeDevice(currentDevice());
  return deviceFault();
}

// Runs in the stream's thread: such a function must not call CUDA (Runtime API,
// cudaLaunchHostFunc), which is not checked.
EMULATED_API cudaError_t
cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  calledDriver(__func__);
  auto* const stream = findStream(handle);
  if (stream == nullptr) return notAStream(__func__);
  return stream->queueHost([=] { function(data); });
}
