#include "gloo/Link.hpp"

#include <ATen/ATen.h>
#include <pthread.h>

#include <cstring>
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

// Where a rank writes that the ranks are to be connected, and one that ends without having been so.
constexpr const char* kConnectKey = "connect";
constexpr const char* kLeftKey = "left";

// Of the reason of a failure.
constexpr int64_t kReasonBytes = 1024;

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

std::string told(const shm::Signature& signature) {
  if (signature.kind != 0) {
    return shm::describe(signature);
  }
  const auto count = uint64_t{signature.countHigh} << 32 | signature.countLow;
  return "a message of " + std::to_string(count) + " x " +
         shm::typeName(static_cast<ncclDataType_t>(signature.types));
}

}  // namespace

Link::Link(
    Connect connect,
    c10::intrusive_ptr<c10d::Store> store,
    std::shared_ptr<Fault> fault,
    std::vector<int> members,
    std::vector<std::string> names,
    int rank)
    : connect_(std::move(connect)),
      store_(std::move(store)),
      fault_(std::move(fault)),
      members_(std::move(members)),
      names_(std::move(names)),
      rank_(rank) {}

std::shared_ptr<Link> Link::make(
    Connect connect,
    c10::intrusive_ptr<c10d::Store> store,
    std::shared_ptr<Fault> fault,
    std::vector<int> members,
    std::vector<std::string> names,
    int rank) {
  std::shared_ptr<Link> link(new Link(
      std::move(connect),
      std::move(store),
      std::move(fault),
      std::move(members),
      std::move(names),
      rank));
  auto* const raw = link.get();
  link->fault_->watch(
      link,
      {.release = [raw] { raw->release(); },
       .tell = [raw] { raw->tellReason(); },
       .told = [raw] { raw->disconnect(); }});
  return link;
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
  changed_.wait(lock, [&] { return fault_->known() || connections_ || closed_; });
  fault_->check();
  if (!connections_) throw shm::Failure(ncclInvalidUsage, "the communicator has been finalized");
  return connections_;
}

void Link::connectThrough(const c10::intrusive_ptr<c10d::Store>& store) {
  auto made = connect_(store, rank_, size());
  {
    std::lock_guard lock(mutex_);
    if (!fault_->known() && !closed_) {
      connections_ = std::move(made);
      expectReasons();
    }
  }
  if (made != nullptr) {
    fault_->awaitTold();  // the others read the reason before they see that these connections end
  }
  changed_.notify_all();
}

// In a thread of its own: the other ranks may take long or never come, and whoever waits here is
// released by a failure.
void Link::startConnecting() {
  {
    std::lock_guard lock(mutex_);
    if (connecting_ || connections_ || closed_ || fault_->known()) {
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
      if (!store || !self->fault_->failAsTold(*store)) {
        self->fault_->fail(shm::Failure(ncclRemoteError, why));
      }
    }).detach();
  } catch (const std::system_error& error) {
    fault_->fail(
        shm::Failure(
            ncclSystemError,
            names_[rank_] + " cannot be connected: no thread can be started (" + error.what() + ")",
            {members_[rank_]}));
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
  const auto connections = this->connections();
  const bool apart = parcel->bytes > kInline || (!parcel->announced && parcel->bytes > 0);
  std::vector<at::Tensor> data{view(parcel->data, parcel->bytes)};
  try {
    std::lock_guard lock(mutex_);  // Gloo's counters are not made for several threads
    if (parcel->announced) {
      parcel->envelope = at::empty({sizeof(Envelope)}, at::kByte);
      std::vector<at::Tensor> tensors{parcel->envelope};
      if (parcel->sending) {
        seal(*parcel);
        parcel->head = connections->send(tensors, parcel->peer, parcel->tag);
      } else {
        parcel->head = parcel->peer < 0 ? connections->recvAnysource(tensors, parcel->tag)
                                        : connections->recv(tensors, parcel->peer, parcel->tag);
      }
    }
    if (apart && parcel->sending) {
      parcel->body = connections->send(data, parcel->peer, parcel->dataTag);
    } else if (apart && parcel->dataTag != 0) {
      parcel->body = connections->recv(data, parcel->peer, parcel->dataTag);
    }
    return parcel;
  } catch (const std::exception& error) {
    raiseBroken(parcel->peer, error.what());
  }
}

// With mutex_ held.
void Link::seal(Parcel& parcel) {
  if (parcel.dataTag == 0) {
    data_ = (data_ + 1) % kTagLimit;
    parcel.dataTag = kDataTags + data_;
  }
  auto& envelope = open(parcel.envelope);
  envelope.signature = parcel.signature;
  envelope.dataTag = parcel.dataTag;
  envelope.bytes = parcel.bytes;
  if (parcel.bytes > 0) {
    std::memcpy(envelope.data, parcel.data, std::min(parcel.bytes, kInline));
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
      for (const auto& work : {parcel.head, parcel.body}) {
        if (work != nullptr) {
          await(work, parcel.peer);
        }
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
  if (parcel.announced) {
    await(parcel.head, parcel.peer);
    if (parcel.peer < 0) {
      parcel.peer = parcel.head->sourceRank();
    }
    const auto& envelope = open(parcel.envelope);
    compare(parcel, envelope.signature);
    if (envelope.bytes <= kInline) {
      if (envelope.bytes > 0) {
        std::memcpy(parcel.data, envelope.data, envelope.bytes);
      }
      return;
    }
    if (parcel.body == nullptr) {
      parcel.body = receiveData(parcel, envelope.dataTag);
    }
  }
  if (parcel.body != nullptr) {
    await(parcel.body, parcel.peer);
  }
}

c10::intrusive_ptr<c10d::Work> Link::receiveData(const Parcel& parcel, int tag) {
  std::vector<at::Tensor> data{view(parcel.data, parcel.bytes)};
  const auto connections = this->connections();
  try {
    std::lock_guard lock(mutex_);
    return connections->recv(data, parcel.peer, tag);
  } catch (const std::exception& error) {
    raiseBroken(parcel.peer, error.what());
  }
}

void Link::receiveOwn(Parcel& parcel) {
  std::unique_lock lock(mutex_);
  auto& queue = toMyself_[parcel.tag];
  changed_.wait(lock, [&] { return fault_->known() || !queue.empty(); });
  fault_->check();
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
  const auto text = "the ranks disagree: " + names_[rank_] + " called " +
                    (parcel.signature.kind == 0 ? "recv for " : "") + told(parcel.signature) +
                    ", " + names_[parcel.peer] + " " + (theirs.kind == 0 ? "sent " : "called ") +
                    told(theirs);
  fault_->fail(shm::Failure(ncclInvalidUsage, text, {members_[rank_], members_[parcel.peer]}));
  throw shm::Failure(ncclInvalidUsage, text);
}

void Link::await(const c10::intrusive_ptr<c10d::Work>& work, int peer) {
  std::list<c10::intrusive_ptr<c10d::Work>>::iterator entry;
  {
    std::lock_guard lock(mutex_);  // release() sees what comes before the failure
    fault_->check();
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
  }
  fault_->check();
  if (!done) {
    raiseBroken(peer, broken);
  }
}

void Link::lookForOthers(const c10::intrusive_ptr<c10d::Store>& connection) {
  if (connected() || !connection->check({kConnectKey})) {
    return;
  }
  if (connection->check({kLeftKey})) {
    const auto text = connection->get(kLeftKey);
    const int rank = std::stoi(std::string(text.begin(), text.end()));
    fault_->fail(
        shm::Failure(
            ncclRemoteError,
            "rank " + std::to_string(rank) +
                " has left before the ranks were connected for tensors of the CPU, which the first "
                "operation on such has them do",
            {rank}));
  }
  startConnecting();
}

void Link::raiseBroken(int peer, const std::string& what) {
  fault_->check();
  if (!failAsHeard(peer) && !fault_->failAsTold()) {
    fault_->fail(
        shm::Failure(
            ncclRemoteError,
            (peer >= 0 ? names_[peer] : "a rank") + " died or left: its connection is broken (" +
                what.substr(0, what.find(". ")) + ")",
            peer >= 0 ? std::vector<int>{members_[peer]} : std::vector<int>{}));
  }
  throw *fault_->known();
}

// The reason of a rank that fails the group and then drops its connections: whoever finds them
// broken has it even where the store has gone with the rank that served it. With mutex_ held.
void Link::expectReasons() {
  for (int peer = 0; connections_ != nullptr && peer < size(); ++peer) {
    if (peer != rank_) {
      std::vector<at::Tensor> texts{at::zeros({kReasonBytes}, at::kByte)};
      reasons_[peer] = {texts.front(), connections_->recv(texts, peer, kReasonTag)};
    }
  }
}

void Link::tellReason() {
  auto text = encode(*fault_->known());
  text.resize(kReasonBytes);
  std::vector<at::Tensor> texts{at::empty({kReasonBytes}, at::kByte)};
  std::memcpy(texts.front().data_ptr(), text.data(), text.size());
  Connections connections;
  {
    std::lock_guard lock(mutex_);
    connections = connections_;
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> sent;
  for (int peer = 0; connections != nullptr && peer < size(); ++peer) {
    try {
      std::lock_guard lock(mutex_);
      if (peer != rank_) {
        sent.push_back(connections->send(texts, peer, kReasonTag));
      }
    } catch (const std::exception&) {
      // It is gone.
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + kReasonPatience;
  for (const auto& work : sent) {
    try {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
      // It is gone, or does not take it.
    }
  }
}

// Fails with the reason that `peer`, whose connection is broken, has told.
bool Link::failAsHeard(int peer) {
  Reason reason;
  {
    std::lock_guard lock(mutex_);
    const auto found = reasons_.find(peer);
    if (found == reasons_.end()) {
      return false;
    }
    reason = std::move(found->second);
    reasons_.erase(found);
  }
  try {
    reason.arrival->wait(kReasonPatience);
  } catch (const std::exception&) {
    return false;
  }
  const auto* const text = static_cast<const char*>(reason.text.data_ptr());
  const auto told = decode(std::string(text, strnlen(text, kReasonBytes)));
  if (told) {
    fault_->fail(*told);
  }
  return told.has_value();
}

void Link::release() {
  std::vector<c10::intrusive_ptr<c10d::Work>> blocked;
  {
    std::lock_guard lock(mutex_);
    blocked.assign(awaited_.begin(), awaited_.end());
  }
  changed_.notify_all();
  for (const auto& work : blocked) {
    work->abort();  // has its wait() return
  }
}

std::vector<int> Link::absentRanks() const {
  std::lock_guard lock(mutex_);
  return late_.empty() ? std::vector<int>{} : std::vector<int>{members_[late_.front()]};
}

void Link::close() {
  bool unconnected = false;
  fault_->awaitTold();
  {
    std::lock_guard lock(mutex_);
    unconnected = !connections_ && !closed_ && size() > 1 && !fault_->known();
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
    Monitor::get().runApart([unfinished = Unfinished(), store = store_, rank = members_[rank_]] {
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
  reasons_.clear();
  last = std::exchange(connections_, nullptr);
}

}  // namespace torchcomms_pg::gloo
