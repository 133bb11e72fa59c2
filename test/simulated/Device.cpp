#include "Device.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/version.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simulated {

namespace {

constexpr size_t kStreamsOfAKind = 16;  // then they are given out again, as CUDA's are
constexpr c10::StreamId kHighPriority = 1000;

// Streams live as long as the process: others keep their ids and handles.
class Streams {
 public:
  explicit Streams(c10::DeviceIndex device) : device_(device) {}

  Stream& get(c10::StreamId id) {
    const std::lock_guard lock(mutex_);
    auto& stream = streams_[id];
    if (!stream) {
      stream = std::make_unique<Stream>(device_, id);
    }
    return *stream;
  }

  c10::StreamId next(bool highPriority) {
    const auto turn = given_[highPriority].fetch_add(1) % kStreamsOfAKind;
    return (highPriority ? kHighPriority : 1) + static_cast<c10::StreamId>(turn);
  }

  std::vector<Stream*> all() {
    const std::lock_guard lock(mutex_);
    std::vector<Stream*> all;
    for (const auto& [id, stream] : streams_) {
      all.push_back(stream.get());
    }
    return all;
  }

 private:
  const c10::DeviceIndex device_;
  std::mutex mutex_;
  std::map<c10::StreamId, std::unique_ptr<Stream>> streams_;
  std::array<std::atomic<size_t>, 2> given_{};
};

Streams& streamsOf(c10::DeviceIndex device) {
  static auto* const all = new std::array<Streams, kDevices>{Streams(0), Streams(1)};
  TORCH_CHECK_VALUE(device >= 0 && device < kDevices, "there is no device sim:", int{device});
  return (*all)[device];
}

thread_local c10::DeviceIndex ownDevice = 0;
thread_local std::array<c10::StreamId, kDevices> ownStreams{};

struct Block {
  void* data;
  size_t size;
  Stream* stream;
  std::vector<Stream*> users;
  std::vector<std::shared_ptr<Mark>> uses;  // must be over before it is used again
};

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kType, currentDevice());
    if (size == 0) {
      return {nullptr, device};
    }
    auto& stream = current(device.index());
    size = (size + 511) / 512 * 512;
    Block* block = nullptr;
    const std::lock_guard lock(mutex_);
    auto& free = free_[{&stream, size}];
    if (free.empty()) {
      void* const data = std::aligned_alloc(512, size);
      TORCH_CHECK(data != nullptr, "sim: out of memory");
      std::memset(data, kPoison, size);
      block = new Block{data, size, &stream, {}, {}};
      all_[data] = block;
    } else {
      block = free.back();
      free.pop_back();
      for (auto& use : std::exchange(block->uses, {})) {
        wait(stream, std::move(use));
      }
      stream.add(
          [data = block->data, size] { std::memset(data, kPoison, size); }, /*delayed=*/false);
    }
    return {block->data, block, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // memory has a stream

  void copy_data(void* to, const void* from, size_t count) const override {
    synchronizeDevice(currentDevice());
    std::memcpy(to, from, count);
  }

  c10::DeviceIndex deviceOf(const void* data) {
    const std::lock_guard lock(mutex_);
    auto found = all_.upper_bound(const_cast<void*>(data));
    if (found == all_.begin()) {
      return -1;
    }
    const auto& block = *std::prev(found)->second;
    const bool inside = data < static_cast<char*>(block.data) + block.size;
    return inside ? block.stream->device() : -1;
  }

  void use(Block& block, Stream& stream) {
    const std::lock_guard lock(mutex_);
    block.users.push_back(&stream);
  }

  static void release(void* context);

 private:
  std::mutex mutex_;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free_;
  std::map<void*, Block*> all_;
};

CachingAllocator& cachingAllocator() {
  static auto* const allocator = new CachingAllocator();
  return *allocator;
}

void CachingAllocator::release(void* context) {
  auto& self = cachingAllocator();
  auto& block = *static_cast<Block*>(context);
  const std::lock_guard lock(self.mutex_);
  for (auto* const user : std::exchange(block.users, {})) {
    block.uses.push_back(record(*user));
  }
  self.free_[{block.stream, block.size}].push_back(&block);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* const data = size == 0 ? nullptr : std::aligned_alloc(64, (size + 63) / 64 * 64);
    const std::lock_guard lock(mutex_);
    sizes_[data] = size;
    return {data, data, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }

  bool has(const void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.upper_bound(const_cast<void*>(data));
    return found != sizes_.begin() &&
           data < static_cast<char*>(std::prev(found)->first) + std::prev(found)->second;
  }

 private:
  static void release(void* data);

  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
};

PinnedAllocator& pinned() {
  static auto* const allocator = new PinnedAllocator();
  return *allocator;
}

void PinnedAllocator::release(void* data) {
  {
    const std::lock_guard lock(pinned().mutex_);
    pinned().sizes_.erase(data);
  }
  std::free(data);
}

}  // namespace

Stream::Stream(c10::DeviceIndex device, c10::StreamId id)
    : device_(device),
      id_(id),
      dawdler_(static_cast<uint64_t>(id) * 31 + static_cast<uint64_t>(device)),
      worker_("sim" + std::to_string(device) + "." + std::to_string(id)) {}

void Graph::replay(Stream& stream) const {
  for (const auto& step : steps_) {
    step(stream);
  }
}

bool Stream::capture(const std::function<void()>& issue) {
  if (!recording()) {
    return false;
  }
  graph_->add([issue](Stream&) { issue(); });
  return true;
}

void Stream::add(std::function<void()> task, bool delayed) {
  if (recording()) {
    graph_->add([task = std::move(task), delayed](Stream& stream) { stream.add(task, delayed); });
    return;
  }
  pending_.fetch_add(1, std::memory_order_relaxed);
  worker_.enqueue([this, task = std::move(task), delayed]() mutable {
    if (delayed) {
      dawdler_.dawdle();
    }
    std::string error;
    try {
      std::exchange(task, nullptr)();
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    const std::lock_guard lock(mutex_);
    if (error_.empty()) {
      error_ = std::move(error);
    }
    tasksEnded.fetch_add(1);
    pending_.fetch_sub(1, std::memory_order_release);
    done_.notify_all();
  });
}

void Stream::wait(std::shared_ptr<Mark> mark) {
  if (recording()) {
    graph_->add([mark = std::move(mark)](Stream& stream) { stream.wait(mark); });
    return;
  }
  add([this, mark = std::move(mark)] { wait_.during(mark, [&] { mark->wait(); }); },
      /*delayed=*/false);
}

void Stream::synchronize() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return idle(); });
  if (!error_.empty()) {
    TORCH_CHECK(false, "sim:", int{device_}, ": ", std::exchange(error_, ""));
  }
}

std::shared_ptr<Mark> record(Stream& stream) {
  auto mark = std::make_shared<Mark>();
  stream.add([mark] { mark->set(); }, /*delayed=*/false);
  return mark;
}

void wait(Stream& stream, std::shared_ptr<Mark> mark) {
  stream.wait(std::move(mark));
}

c10::DeviceIndex currentDevice() {
  return ownDevice;
}

void setDevice(c10::DeviceIndex device) {
  streamsOf(device);
  ownDevice = device;
}

Stream& find(const c10::Stream& stream) {
  return streamsOf(stream.device_index()).get(stream.id());
}

Stream& current(c10::DeviceIndex device) {
  return find(currentStream(device));
}

c10::Stream currentStream(c10::DeviceIndex device) {
  streamsOf(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), ownStreams[device]);
}

c10::Stream exchangeStream(const c10::Stream& stream) {
  const auto before = currentStream(stream.device_index());
  ownStreams[stream.device_index()] = stream.id();
  return before;
}

c10::Stream newStream(c10::DeviceIndex device, bool highPriority) {
  const auto id = streamsOf(device).next(highPriority);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

std::vector<c10::StreamId> highPriorityStreams(c10::DeviceIndex device) {
  std::vector<c10::StreamId> ids;
  for (auto* const stream : streamsOf(device).all()) {
    if (stream->id() >= kHighPriority) {
      ids.push_back(stream->id());
    }
  }
  return ids;
}

void synchronizeDevice(c10::DeviceIndex device) {
  for (auto* const stream : streamsOf(device).all()) {
    stream->synchronize();
  }
}

bool settled() {
  std::vector<Stream*> all;
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    for (auto* const stream : streamsOf(device).all()) {
      all.push_back(stream);
    }
  }
  return atRest(all);
}

c10::Allocator* allocator() {
  return &cachingAllocator();
}

c10::Allocator* pinnedAllocator() {
  return &pinned();
}

bool isPinned(const void* data) {
  return pinned().has(data);
}

c10::DeviceIndex deviceOf(const void* data) {
  return cachingAllocator().deviceOf(data);
}

void recordStream(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (auto* const block = memory.cast_context<Block>(&CachingAllocator::release)) {
    cachingAllocator().use(*block, find(stream));
  }
}

namespace {

std::atomic<bool> driverHangs{false};
std::atomic<uint64_t> earlyQueriesOfMain{0};
std::atomic<uint64_t> earlyQueriesOfOthers{0};

// Number of calls for streams and events by this thread: those that would call a driver.
thread_local uint64_t calls = 0;

struct Event {
  std::shared_ptr<Mark> mark;
};

Event& eventOf(void* event) {
  return *static_cast<Event*>(event);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, currentDevice()}; }
  void setDevice(c10::Device device) const override { simulated::setDevice(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    ownDevice = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return currentStream(indexOf(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, indexOf(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool highPriority) const override {
    return newStream(indexOf(device), highPriority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return newStream(indexOf(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return simulated::exchangeStream(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return find(stream).handle();
  }
  bool queryStream(const c10::Stream& stream) const override { return find(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    TORCH_CHECK(!find(stream).recording(), "sim: a stream that records a graph has no end");
    find(stream).synchronize();
  }
#if TORCH_VERSION_MINOR >= 12
  bool isStreamCapturing(const c10::Stream& stream) const override {
    ++calls;
    return find(stream).recording();
  }
#endif
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    simulated::synchronizeDevice(device);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
      const c10::EventFlag /*flag*/) const override {
    ++calls;
    if (*event == nullptr) {
      ++calls;
      *event = new Event();
    }
    eventOf(*event).mark = simulated::record(find(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    ++calls;
    wait(find(stream), eventOf(event).mark);
  }
  bool queryEvent(void* event) const override {
    ++calls;
    driverHangs.wait(true);
    const bool set = eventOf(event).mark->isSet();
    if (!set) {
      ++(gettid() == getpid() ? earlyQueriesOfMain : earlyQueriesOfOthers);
    }
    return set;
  }
  void synchronizeEvent(void* event) const override {
    ++calls;
    eventOf(event).mark->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    return std::chrono::duration<double, std::milli>(
               eventOf(second).mark->time() - eventOf(first).mark->time())
        .count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    recordStream(memory, stream);
  }

 private:
  c10::DeviceIndex indexOf(c10::Device device) const {
    return device.has_index() ? device.index() : currentDevice();
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void hangDriver(bool hangs) {
  driverHangs = hangs;
  driverHangs.notify_all();
}

std::pair<uint64_t, uint64_t> earlyQueries() {
  return {earlyQueriesOfMain.load(), earlyQueriesOfOthers.load()};
}

uint64_t deviceCalls() {
  return calls;
}

}  // namespace simulated
