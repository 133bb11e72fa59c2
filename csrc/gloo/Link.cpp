#include "gloo/Link.hpp"

#include <ATen/ATen.h>
#include <pthread.h>

#include <cstring>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "device/Unfinished.hpp"
#include "monitor/Monitor.hpp"
#include "shm/Names.hpp"

namespace torchcomms_pg::gloo {

namespace {

// Gloo's own timeout, which must never pass: the monitor keeps the deadlines.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

// Where a rank writes why it has failed the group: the ranks at fault, then the reason.
constexpr const char* kReasonKey = "failed";

// Where a rank writes that the ranks are to be connected, and one that ends without having been so.
constexpr const char* kConnectKey = "connect";
constexpr const char* kLeftKey = "left";

// Tags, by what they are of.
constexpr int kCollectiveTags = Link::kTagLimit;
constexpr int kDataTags = 2 * Link::kTagLimit;

constexpr size_t kInline = 464;
struct Envelope {
  shm::Signature signature;
  int32_t dataTag;
  uint64_t bytes;
  char data[kInline];
};
static_assert(sizeof(Envelope) == 488 && std::is_trivially_copyable_v<Envelope>);

Envelope& open(const at::Tensor& tensor) {
  return *static_cast<Envelope*>(tensor.data_ptr());
}

at::Tensor view(void* data, size_t bytes) {
  return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte);
}

std::string encode(const shm::Failure& failure) {
  std::string text;
  for (const int rank : failure.ranks) {
    text += std::to_string(rank) + " ";
  }
  return text + "\n" + failure.what();
}

// None: nobody has written it.
std::optional<shm::Failure> decode(const std::string& text) {
  const auto end = text.find('\n');
  if (end == std::string::npos) {
    return std::nullopt;
  }
  std::vector<int> ranks;
  std::istringstream in(text.substr(0, end));
  for (int rank = 0; in >> rank;) {
    ranks.push_back(rank);
  }
  return shm::Failure(ncclRemoteError, text.substr(end + 1), std::move(ranks));
}

std::string told(const shm::Signature& signature) {
  if (signature.kind != 0) {
    return shm::describe(signature);
  }
  const auto count = uint64_t{signature.countHigh} << 32 | signature.countLow;
  return "a message of " + std::to_string(count) + " x " +
         shm::typeName(static_cast<ncclDataType_t>(signature.types));
}

}  // namespace

Link::Link(Connect connect, c10::intrusive_ptr<c10d::Store> store, int rank, int size)
    : connect_(std::move(connect)), store_(std::move(store)), rank_(rank), size_(size) {}

int Link::nextCollectiveTag() {
  std::lock_guard lock(mutex_);
  collectives_ = (collectives_ + 1) % kTagLimit;
  return kCollectiveTags + collectives_;
}

std::optional<shm::Failure> Link::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Link::checkUsable() const {
  if (const auto known = failure()) throw *known;
}

bool Link::connected() const {
  std::lock_guard lock(mutex_);
  return connections_ != nullptr;
}

Connections Link::connections() {
  if (!connected()) {
    startConnecting();
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || connections_ || closed_; });
  if (failure_) throw *failure_;
  if (!connections_) throw shm::Failure(ncclInvalidUsage, "the communicator has been finalized");
  return connections_;
}

void Link::connectThrough(const c10::intrusive_ptr<c10d::Store>& store) {
  auto made = connect_(store, rank_, size_);
  {
    std::unique_lock lock(mutex_);
    if (failure_) {
      // The others read the reason before they see that these connections end.
      changed_.wait_for(lock, kTellPatience, [&] { return told_; });
    } else if (!closed_) {
      connections_ = std::move(made);
    }
  }
  changed_.notify_all();
}

// In a thread of its own: the other ranks may take long or never come, and whoever waits here is
// released by a failure.
void Link::startConnecting() {
  {
    std::lock_guard lock(mutex_);
    if (connecting_ || connections_ || failure_ || closed_) {
      return;
    }
    connecting_ = true;
  }
  try {
    std::thread([unfinished = Unfinished(), self = shared_from_this()] {
      pthread_setname_np(pthread_self(), "tcpg_gloo");
      c10::intrusive_ptr<c10d::Store> store;
      std::string why;
      try {
        store = self->store_->clone();  // another thread may wait in the shared one
        store->set(kConnectKey, std::vector<uint8_t>{});
        return self->connectThrough(store);
      } catch (const c10::Error& error) {
        why = error.what_without_backtrace();
      } catch (const std::exception& error) {
        why = error.what();
      }
      if (!store || !self->failAsTold(*store)) {
        self->fail(ncclRemoteError, why, {});
      }
    }).detach();
  } catch (const std::system_error& error) {
    const auto who = "rank " + std::to_string(rank_) + " cannot be connected: ";
    fail(ncclSystemError, who + "no thread can be started (" + error.what() + ")", {rank_});
  }
}

std::shared_ptr<Parcel> Link::post(Parcel posted) {
  auto parcel = std::make_shared<Parcel>(std::move(posted));
  if (parcel->peer == rank_) {
    if (parcel->sending) {
      const auto* const data = static_cast<const char*>(parcel->data);
      std::lock_guard lock(mutex_);
      toMyself_[parcel->tag].push_back({parcel->signature, {data, data + parcel->bytes}});
      changed_.notify_all();
    }
    return parcel;
  }
  parcel->envelope = at::empty({sizeof(Envelope)}, at::kByte);
  std::vector<at::Tensor> tensors{parcel->envelope};
  const auto connections = this->connections();
  try {
    if (!parcel->sending) {
      std::lock_guard lock(mutex_);  // Gloo's counters are not made for several threads
      parcel->works.push_back(
          parcel->peer < 0 ? connections->recvAnysource(tensors, parcel->tag)
                           : connections->recv(tensors, parcel->peer, parcel->tag));
      return parcel;
    }
    std::lock_guard lock(mutex_);
    auto& envelope = open(parcel->envelope);
    data_ = (data_ + 1) % kTagLimit;
    envelope.signature = parcel->signature;
    envelope.dataTag = kDataTags + data_;
    envelope.bytes = parcel->bytes;
    if (parcel->bytes > 0) {
      std::memcpy(envelope.data, parcel->data, std::min(parcel->bytes, kInline));
    }
    parcel->works.push_back(connections->send(tensors, parcel->peer, parcel->tag));
    if (parcel->bytes > kInline) {
      std::vector<at::Tensor> data{view(parcel->data, parcel->bytes)};
      parcel->works.push_back(connections->send(data, parcel->peer, envelope.dataTag));
    }
    return parcel;
  } catch (const std::exception& error) {
    raiseBroken(parcel->peer, error.what());
  }
}

int Link::complete(Parcel& parcel, bool late) {
  std::optional<std::list<int>::iterator> entry;
  if (late) {
    std::lock_guard lock(mutex_);
    entry = late_.insert(late_.end(), parcel.peer);
  }
  const auto leave = [&] {
    if (entry) {
      std::lock_guard lock(mutex_);
      late_.erase(*entry);
    }
  };
  try {
    if (!parcel.sending) {
      parcel.peer == rank_ ? receiveOwn(parcel) : receive(parcel);
    } else {
      for (const auto& work : parcel.works) {
        await(work, parcel.peer);
      }
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
  return parcel.peer;
}

void Link::receive(Parcel& parcel) {
  await(parcel.works.front(), parcel.peer);
  if (parcel.peer < 0) {
    parcel.peer = parcel.works.front()->sourceRank();
  }
  const auto& envelope = open(parcel.envelope);
  compare(parcel, envelope.signature);
  if (envelope.bytes <= kInline) {
    if (envelope.bytes > 0) {
      std::memcpy(parcel.data, envelope.data, envelope.bytes);
    }
    return;
  }
  std::vector<at::Tensor> data{view(parcel.data, parcel.bytes)};
  const auto connections = this->connections();
  c10::intrusive_ptr<c10d::Work> work;
  try {
    std::lock_guard lock(mutex_);
    work = connections->recv(data, parcel.peer, envelope.dataTag);
  } catch (const std::exception& error) {
    raiseBroken(parcel.peer, error.what());
  }
  await(work, parcel.peer);
}

void Link::receiveOwn(Parcel& parcel) {
  std::unique_lock lock(mutex_);
  auto& queue = toMyself_[parcel.tag];
  changed_.wait(lock, [&] { return failure_ || !queue.empty(); });
  if (failure_) throw *failure_;
  const Kept message = std::move(queue.front());
  queue.pop_front();
  if (queue.empty()) {
    toMyself_.erase(parcel.tag);
  }
  lock.unlock();
  compare(parcel, message.signature);
  if (!message.data.empty()) {
    std::memcpy(parcel.data, message.data.data(), message.data.size());
  }
}

void Link::compare(const Parcel& parcel, const shm::Signature& theirs) {
  if (theirs == parcel.signature) {
    return;
  }
  const auto text = "the ranks disagree: rank " + std::to_string(rank_) + " called " +
                    (parcel.signature.kind == 0 ? "recv for " : "") + told(parcel.signature) +
                    ", rank " + std::to_string(parcel.peer) + " " +
                    (theirs.kind == 0 ? "sent " : "called ") + told(theirs);
  fail(ncclInvalidUsage, text, {rank_, parcel.peer});
  throw shm::Failure(ncclInvalidUsage, text);
}

void Link::await(const c10::intrusive_ptr<c10d::Work>& work, int peer) {
  std::list<c10::intrusive_ptr<c10d::Work>>::iterator entry;
  {
    std::lock_guard lock(mutex_);
    if (failure_) throw *failure_;
    entry = awaited_.insert(awaited_.end(), work);
  }
  std::string broken;
  bool done = false;
  try {
    done = work->wait(kNever);
  } catch (const std::exception& error) {
    broken = error.what();
  }
  {
    std::lock_guard lock(mutex_);
    awaited_.erase(entry);
    if (failure_) throw *failure_;
  }
  if (!done) {
    raiseBroken(peer, broken);
  }
}

bool Link::failAsTold(c10d::Store& store) {
  std::vector<uint8_t> text;
  try {
    if (store.check({kReasonKey})) {
      text = store.get(kReasonKey);
    }
  } catch (const std::exception&) {
    return false;  // the store went with the rank that served it
  }
  const auto told = decode({text.begin(), text.end()});
  if (told) {
    fail(ncclRemoteError, told->what(), told->ranks);
  }
  return told.has_value();
}

std::function<void()> Link::probe() {
  return [self = shared_from_this(), store = c10::intrusive_ptr<c10d::Store>()]() mutable {
    if (self->failure()) {
      return;
    }
    if (!store) {
      store = self->store_->clone();  // since another thread may wait in the shared connection
    }
    if (!self->failAsTold(*store) && !self->connected()) {
      self->lookForOthers(*store);
    }
  };
}

void Link::lookForOthers(c10d::Store& store) {
  if (!store.check({kConnectKey})) {
    return;
  }
  if (store.check({kLeftKey})) {
    const auto text = store.get(kLeftKey);
    const int rank = std::stoi(std::string(text.begin(), text.end()));
    fail(
        ncclRemoteError,
        "rank " + std::to_string(rank) +
            " has left before the ranks were connected for tensors of the CPU, which the first "
            "operation on such has them do",
        {rank});
  }
  startConnecting();
}

void Link::raiseBroken(int peer, const std::string& what) {
  checkUsable();
  if (!failAsTold(*store_)) {
    const std::string who = peer >= 0 ? "rank " + std::to_string(peer) : "a rank";
    fail(
        ncclRemoteError,
        who + " died or left: its connection is broken (" + what.substr(0, what.find(". ")) + ")",
        peer >= 0 ? std::vector<int>{peer} : std::vector<int>{});
  }
  throw *failure();
}

void Link::fail(ncclResult_t result, const std::string& reason, const std::vector<int>& ranks) {
  std::vector<c10::intrusive_ptr<c10d::Work>> blocked;
  {
    std::lock_guard lock(mutex_);
    if (failure_) {
      return;
    }
    failure_.emplace(result, reason, ranks);
    blocked.assign(awaited_.begin(), awaited_.end());
  }
  changed_.notify_all();
  for (const auto& work : blocked) {
    work->abort();  // has its wait() return
  }
  // Talks to the store, which may block.
  Monitor::get().runApart(
      [unfinished = Unfinished(), self = shared_from_this()] { self->tellOthers(); });
}

void Link::tellOthers() {
  try {
    const std::string text = encode(*failure());
    if (!store_->check({kReasonKey})) {
      store_->set(kReasonKey, std::vector<uint8_t>(text.begin(), text.end()));
    }
  } catch (const std::exception&) {
    // Then they learn from the broken connection alone.
  }
  {
    std::lock_guard lock(mutex_);
    told_ = true;
  }
  changed_.notify_all();
  disconnect();
}

std::vector<int> Link::absentRanks() const {
  std::lock_guard lock(mutex_);
  if (failure_) {
    return failure_->ranks;
  }
  return late_.empty() ? std::vector<int>{} : std::vector<int>{late_.front()};
}

void Link::close() {
  bool unconnected = false;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kTellPatience, [&] { return !failure_ || told_; });
    unconnected = !connections_ && !failure_ && !closed_ && size_ > 1;
    closed_ = true;
  }
  changed_.notify_all();
  if (unconnected) {
    tellLeft();
  }
  disconnect();
}

void Link::tellLeft() {
  try {
    Monitor::get().runApart([unfinished = Unfinished(), store = store_, rank = rank_] {
      try {
        store->set(kLeftKey, std::to_string(rank));
      } catch (const std::exception&) {
        // The store has gone, and so have those who would have read it.
      }
    });
  } catch (const std::runtime_error&) {
    // No thread can be started: whoever still waits does so until the deadline.
  }
}

void Link::disconnect() {
  Connections last;  // freed after the lock is released: that joins threads
  std::lock_guard lock(mutex_);
  last = std::exchange(connections_, nullptr);
}

}  // namespace torchcomms_pg::gloo
