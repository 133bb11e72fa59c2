#include "diagnosis/watch/WatchedGroup.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <numeric>
#include <thread>

#include "base/ExitGuard.hpp"
#include "diagnosis/group/ErrorFile.hpp"
#include "diagnosis/group/ProcessTotals.hpp"
#include "diagnosis/hang/RankWords.hpp"
#include "diagnosis/store/JobStore.hpp"
#include "diagnosis/store/LeftWords.hpp"
#include "diagnosis/store/StoreBoard.hpp"
#include "host/Peer.hpp"
#include "monitor/Printable.hpp"
#include "monitor/Printer.hpp"
#include "recorder/MessageBatch.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

RecordedOp::Recorders recordersOf(const Group& group, const std::vector<int64_t>& ranks, int rank) {
  auto all = std::make_shared<std::vector<RecorderGroup>>();
  if (auto recorder = process_recorder::get()) {
    auto* const recorded =
        recorder->addGroup(group.name, group.description, group.backend, ranks, rank);
    all->push_back({std::move(recorder), recorded});
  }
  return all;
}

bool ofOneSize(const std::vector<at::Tensor>& tensors) {
  return std::ranges::all_of(
      tensors, [&](const auto& tensor) { return tensor.numel() == tensors.front().numel(); });
}

// Returns the operation's name in the recorder. If a list's tensors differ in size, it is
// kUnchecked, for which torch's analyser compares no sizes; see RecorderSet.
const char* recordedAs(OpKind kind, const latest::PreHookArgs& args) {
  const auto& known = traits(kind);
  switch (kind) {
    case OpKind::allReduce:
      return args.input_tensors.size() > 1 ? known.recordedBatch : known.recorded;
    case OpKind::allGather: return ofOneSize(args.output_tensors) ? known.recorded : kUnchecked;
    case OpKind::reduceScatter: return ofOneSize(args.input_tensors) ? known.recorded : kUnchecked;
    default: return known.recorded;
  }
}

// kShowing: limit of the time in which a failing operation's reason may show. kExplaining: limit of
// the time for which a group that is being closed waits for the line about the reason.
constexpr Milliseconds kShowing{300};
constexpr Milliseconds kExplaining{600};
constexpr Milliseconds kBetweenTries{20};
constexpr size_t kMostDead = 8;  // number of dead ranks that a line names

// Returns what is known of a rank that has not answered.
Silent describe(RankWords& processes, int rank) {
  const auto word = processes.of(rank);
  if (!word) {
    return {"did not answer"};
  }
  const auto peer = Peer::parse(*word);
  return peer.pid == 0 ? Silent{"did not answer, and has not said where it runs"}
                       : describeSilent(peer);
}

// Prints a warning if another rank has given the group's name to other members. Compares with the
// first rank that has made the group.
void compareMembers(
    StoreBoard& board, const Group& group, const std::vector<int64_t>& ranks, int64_t self) {
  const auto members = asRuns(ranks);
  const auto mine = std::to_string(self) + ":" + members;
  const auto first = board.claimed("members", mine);
  const auto end = std::min(first.find(':'), first.size());
  const auto theirs = first.substr(std::min(end + 1, first.size()));
  if (theirs != members) {
    printLine(
        "[rank " + std::to_string(self) + "] torchcomms_pg: group '" + group.name +
        "' has other members on rank " + std::to_string(self) + " (ranks " + members +
        ") than on rank " + first.substr(0, end) + " (ranks " + theirs +
        "). These ranks meet under one name, so operations of the group hang or return wrong "
        "results. Call new_group on all ranks with the same ranks and in the same order");
  }
}

// Returns whether the results are in the inputs. Hooks then have no outputs, which torch's analyser
// would compare with the inputs.
bool inPlace(OpKind kind) {
  return kind == OpKind::allReduce || kind == OpKind::broadcast || kind == OpKind::reduce;
}

}  // namespace

WatchedGroup::WatchedGroup(
    Group group, int rank, int size, c10::DeviceType type, Milliseconds timeout)
    : group_(std::move(group)),
      rank_(rank),
      size_(size),
      type_(type),
      key_(keyOf(*this, std::string("watched ") + c10::DeviceTypeName(type))),
      timeoutMs_(timeout.count()),
      issued_(size),
      inFlight_(std::make_shared<GroupTotals>(group_.name, group_.backend, /*watched=*/true)),
      recorders_(recordersOf(group_, WatchedGroup::globalRanks(), rank)) {
  process_totals::add(inFlight_.sharedTotals(), globalRank());
}

WatchedGroup::~WatchedGroup() {
  if (!ofThisProcess()) {
    return;  // threads of the parent may have held the locks at the fork
  }
  close();
  for (const auto& [device, watch] : devices_) {
    watch->leave();
  }
}

std::vector<int64_t> WatchedGroup::globalRanks() const {
  return group_.ranks(size_);
}

void WatchedGroup::open(const c10::intrusive_ptr<c10d::Store>& store, bool compares) {
  if (size_ == 1) {
    return;
  }
  StoreBoard board(store);
  const auto ranks = globalRanks();
  const auto self = ranks[rank_];
  // Numbers the groups of this name: a group that is made again must not find the keys of the
  // earlier group in the store. Each rank has a separate number: if ranks give one name to groups
  // with different members, one rank may be in both groups.
  const auto number = std::to_string(board.add("watch/" + std::to_string(self), 1));
  const auto own = c10::make_intrusive<c10d::PrefixStore>("watch/" + number, store);
  StoreBoard here(own);
  if (compares) {
    compareMembers(here, group_, ranks, self);
  }
  const auto processes = std::make_shared<RankWords>(std::make_unique<StoreBoard>(own));
  processes->write(rank_, Peer::self().text());
  HangDiagnosis::Options options;
  options.rank = rank_;
  options.ranks.resize(size_);
  std::iota(options.ranks.begin(), options.ranks.end(), 0);
  options.number = group_.numberOf(rank_);
  options.describeSilent = [processes](int peer) { return describe(*processes, peer); };
  options.goesOn = true;
  {
    LockGuard lock(mutex_);
    store_ = own;
  }
  enlist(shared_from_this());
  // The process's status server has to run when its looks for news begin.
  status_.store(StatusPart::begin(*this, store, /*severalHosts=*/true));
  auto hosts = JobStore::of(store)->hosts();
  options.slack = [weak = std::weak_ptr(hosts)] {
    const auto known = weak.lock();
    return known ? known->news().slack() : Milliseconds(0);
  };
  auto diagnosis = HangDiagnosis::open(std::make_unique<StoreBoard>(own), std::move(options));
  hosts->news().listen(key_, diagnosis);
  hosts_.store(std::move(hosts));
  diagnosis_.store(std::move(diagnosis));
  if (!queues()) {
    lateness_.open(store, std::to_string(key_) + "/" + number, group_, rank_, size_);
  }
}

std::vector<std::shared_ptr<WatchedOp>> WatchedGroup::operations(auto chosen) const {
  return inFlight_.inspect([&](const auto& ops, const Operation&) {
    std::vector<std::shared_ptr<WatchedOp>> all;
    for (const auto& entry : ops) {
      if (chosen(*static_cast<const WatchedOp*>(entry.keeper.get()))) {
        all.push_back(std::static_pointer_cast<WatchedOp>(entry.keeper));
      }
    }
    return all;
  });
}

void WatchedGroup::close() {
  if (!ofThisProcess() || closed_.exchange(true, std::memory_order_acq_rel)) {
    return;
  }
  lateness_.close();
  process_totals::keepLateness(inFlight_.totals(), lateness_.judged());
  // Releases the store: its port may be needed again at once.
  if (const auto diagnosis = diagnosis_.exchange({})) {
    if (diagnosis->standing()) {
      for (const auto& op : operations([](const WatchedOp&) { return true; })) {
        if (const auto end = op->ask()) {
          endAsked(*op, *end);
        }
      }
    }
    verdicts_.close(*diagnosis);
  }
  hosts_.store({});
  status_.store({});
  {
    LockGuard lock(mutex_);
    store_.reset();
    told_.clear();  // the list of operations in flight keeps them
  }
  for (const auto& op : operations([](const WatchedOp&) { return true; })) {
    endAsked(*op, op->ask().value_or(WatchedOp::End{}));
  }
}

std::shared_ptr<WatchedOp> WatchedGroup::begin(
    Operation op, const latest::PreHookArgs& args, Stack stack) {
  issued_.number(op);
  if (op.collective) {
    lateness_.arrive(op.seq, op.issued);
  }
  op.timeout = Milliseconds(timeoutMs_.load(std::memory_order_relaxed));
  auto begun =
      std::make_shared<WatchedOp>(shared_from_this(), std::move(op), recorders_, std::move(stack));
  if (!recorders_->empty()) {
    record(*begun, args);
  }
  begun->setEntry(inFlight_.add(begun->operation(), begun));
  if (tells_) {
    begun->setCounted();
    LockGuard lock(mutex_);
    ++calls_;
  }
  return begun;
}

void WatchedGroup::record(WatchedOp& watched, const latest::PreHookArgs& args) {
  const auto& op = watched.operation();
  const bool message = isPointToPoint(op.kind);
  const auto* const what = recordedAs(op.kind, args);
  OpRecord::Details details;
  if (!message) {
    details.root = hasRoot(op.kind) ? op.peer : -1;
  } else if (const auto batch = MessageBatch::first(op.seq); batch > 0 || !queues()) {
    details.batch = batch;  // on an accelerator c10d's coalescing, which no hook tells, may be open
  }
  watched.recording().add(
      {.op = what,
       .seq = op.seq,
       .inputs = args.input_tensors,
       .outputs = inPlace(op.kind) && args.output_tensors.empty() ? args.input_tensors
                                                                  : args.output_tensors,
       .join = !message && what != kUnchecked,
       .timeout = op.timeout,
       .direction = !message                  ? OpRecord::Direction::none
                    : op.kind == OpKind::send ? OpRecord::Direction::send
                                              : OpRecord::Direction::receive,
       .peer = message ? op.peer : -1,
       .started = !queues(),
       .details = details});
}

void WatchedGroup::leave(
    const std::shared_ptr<WatchedOp>& op, c10::intrusive_ptr<c10d::Work> work, c10::Device device) {
  const bool async = op->operation().async;
  if (work && async) {
    inFlight_.leave(op->operation());
  }
  if (!work && !tells_ && queues()) {
    // Up to 2.14, torch's nccl gives no Work to a caller that does not ask for one.
    op->leaveInStream(device);
    askLater(op, device);
    return;
  }
  bool ended = !work;
  const auto key = tells_ && work ? completionKey(*work) : 0;
  if (tells_) {
    LockGuard lock(mutex_);
    ended = ended || early_.erase(key) > 0 || closed();
    if (!ended && key != 0) {
      told_.emplace(key, op);
    }
    endCall(*op);
  }
  if (ended) {
    end(*op, /*completed=*/true);
  } else if (key != 0) {
    op->leave(nullptr);
  } else {
    op->leave(std::move(work));
    if (async || queues()) {
      askLater(op, device);
    } else if (!asking_.exchange(true)) {
      askWaiting();
    }
  }
}

namespace {

// Polls one operation for its end.
class AskedOp final : public EventPoller::Awaited {
 public:
  explicit AskedOp(std::shared_ptr<WatchedOp> op) : op_(std::move(op)) {}
  bool ask() noexcept override {
    end_ = op_->ask();
    return end_.has_value();
  }
  void ended(std::shared_ptr<Awaited> /*self*/) noexcept override {
    op_->notePending(lastPending());
    op_->group().endAsked(*op_, *end_);
  }

 private:
  const std::shared_ptr<WatchedOp> op_;
  std::optional<WatchedOp::End> end_;
};

// Calls a function at each round of polling, until it returns true.
class AskedAgain final : public EventPoller::Awaited {
 public:
  explicit AskedAgain(std::function<bool()> ask) : ask_(std::move(ask)) {}
  bool ask() noexcept override { return ask_(); }
  void ended(std::shared_ptr<Awaited> /*self*/) noexcept override {}

 private:
  const std::function<bool()> ask_;
};

}  // namespace

void WatchedGroup::askLater(const std::shared_ptr<WatchedOp>& op, c10::Device device) {
  // Collectives of one group end in order; messages do not.
  const auto queue = op->operation().collective ? reinterpret_cast<intptr_t>(this)
                                                : reinterpret_cast<intptr_t>(op.get());
  watchOn(device).add(queue, std::make_shared<AskedOp>(op));
}

// Makes the device's thread poll the operations that threads wait for. Most have ended before, and
// the waiting thread has reported that through pass().
void WatchedGroup::askWaiting() {
  watchOn(c10::DeviceType::CPU)
      .add(
          reinterpret_cast<intptr_t>(&asking_),
          std::make_shared<AskedAgain>([weak = weak_from_this()] {
            const auto self = weak.lock();
            if (!self) {
              return true;
            }
            // reset before the look, so that a later operation starts another
            self->asking_ = false;
            bool left = false;
            const auto waitedFor = self->operations(
                [](const WatchedOp& op) { return op.returned() && !op.operation().async; });
            for (const auto& op : waitedFor) {
              if (const auto end = op->ask()) {
                self->endAsked(*op, *end);
              } else {
                op->notePending(Clock::now());
                left = true;
              }
            }
            return !left || self->asking_.exchange(true);
          }));
}

void WatchedGroup::pass(std::shared_ptr<WatchedOp> op, Clock::time_point now) {
  if (const auto end = op->ask()) {
    endAsked(*op, *end, now);
    if (op.use_count() == 1) {
      op->drop();
    }
  } else {
    inFlight_.leave(op->operation());  // its caller did not wait for it
    askLater(op, c10::DeviceType::CPU);
  }
}

EventPoller& WatchedGroup::watchOn(c10::Device device) {
  LockGuard lock(mutex_);
  for (const auto& [known, watch] : devices_) {
    if (known == device) {
      return *watch;
    }
  }
  auto& watch = EventPoller::of(device);
  watch.join();
  devices_.emplace_back(device, &watch);
  watch.start();
  return watch;
}

void WatchedGroup::endCall(WatchedOp& op) {
  if (op.takeCounted() && --calls_ == 0) {
    early_.clear();
  }
}

void WatchedGroup::discard(WatchedOp& op) {
  {
    LockGuard lock(mutex_);
    endCall(op);
  }
  if (op.takeEnd()) {
    issued_.takeBack(op.operation());
    op.operation().recording->end(/*completed=*/false, {}, -1);
    inFlight_.finish(op.entry(), {.completed = false});
  }
}

void WatchedGroup::fail(WatchedOp& op) {
  tellFailure(op.operation());
  discard(op);
}

void WatchedGroup::completed(const latest::CompletionHookArgs& args) {
  std::shared_ptr<WatchedOp> op;
  {
    LockGuard lock(mutex_);
    if (auto found = told_.extract(args.completionKey)) {
      op = std::move(found.mapped());
    } else if (calls_ > 0) {
      early_.insert(args.completionKey);
    }
  }
  if (op) {
    const std::chrono::duration<float, std::milli> took(args.duration_ms.value_or(0));
    end(*op, /*completed=*/true, std::chrono::duration_cast<Clock::duration>(took));
  }
}

void WatchedGroup::end(WatchedOp& op, bool completed, Clock::duration duration) {
  const auto now = Clock::now();
  finish(op, completed, duration, now - op.operation().issued, now);
}

void WatchedGroup::endAsked(WatchedOp& op, const WatchedOp::End& how, Clock::time_point now) {
  const bool unread =
      op.operation().async && isPointToPoint(op.operation().kind) && op.waiter().thread == 0;
  if (how.failed && !unread) {  // no thread waits for the message
    tellFailure(op.operation());
  }
  // It is unknown how long after its end an operation is polled.
  const auto lasted = op.lastPending() - op.operation().issued;
  finish(op, how.completed, {}, std::max(lasted, Clock::duration{}), now);
}

void WatchedGroup::finish(
    WatchedOp& watched, bool completed, Clock::duration duration, Clock::duration lasted,
    Clock::time_point now) {
  if (!watched.takeEnd()) {
    return;
  }
  const auto& op = watched.operation();
  op.recording->end(completed, duration, -1);
  if (!op.async && !queues()) {
    inFlight_.totals().noteWait(op.kind, lasted);
  }
  inFlight_.finish(watched.entry(), {.completed = completed, .lasted = lasted, .known = !closed()});
  lastEnd_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
}

void WatchedGroup::check(Clock::time_point now) noexcept try {
  lateness_.check(now);
  const auto diagnosis = diagnosis_.load();
  if (!diagnosis || closed()) {
    return;
  }
  if (verdicts_.look(*diagnosis)) {
    inFlight_.totals().noteFailure();
    process_totals::noteFailure();
    dumpApart(*this);
  }
  const Milliseconds timeout(timeoutMs_.load(std::memory_order_relaxed));
  const auto late = verdicts_.overdue(now, timeout);
  const bool wanted = diagnosis->wantsStatus() || late;
  const bool known = forgetRaised(now, wanted);
  wantedAt_ = !wanted ? std::nullopt : wantedAt_ ? wantedAt_ : std::optional(now);
  if (wanted && !known && now - *wantedAt_ < WatchedOp::kQuestion) {
    return;  // a thread that seems to be in a call may have left it
  }
  if (diagnosis->takeRing()) {
    if (const auto hosts = hosts_.load()) {
      hosts->news().ring(key_);
    }
  }
  if (diagnosis->wantsStatus()) {
    diagnosis->answer(snapshotOf(*this, now));
  }
  verdicts_.ask(*diagnosis, late, now, timeout);
} catch (const std::exception&) {
  // Out of memory, or no thread can be started; the next tick tries again.
}

GroupActivity::Waiter WatchedGroup::waiterFor(const InFlight& entry) const {
  return entry.left && !queues() ? static_cast<const WatchedOp*>(entry.keeper.get())->waiter()
                                 : GroupActivity::waiterFor(entry);
}

std::optional<Clock::time_point> WatchedGroup::begun(
    const InFlightOps::List& ops, const InFlight& entry) const {
  const auto& op = *entry.op;
  if (op.collective) {
    const Clock::time_point lastEnd{Clock::duration(lastEnd_.load(std::memory_order_relaxed))};
    return std::max(op.issued, lastEnd);
  }
  if (queues()) {
    return op.issued;
  }
  return mayBeAwaited(*this, ops, entry) ? std::optional(waiterFor(entry).since) : std::nullopt;
}

bool WatchedGroup::forgetRaised(Clock::time_point now, bool wanted) {
  bool known = true;
  const auto inCalls = operations([&](const WatchedOp& op) {
    monitorThread.check();
    return !op.returned() && (wanted || op.looksAgain(now));
  });
  for (const auto& op : inCalls) {
    const auto inCall = op->inCall(now);
    if (inCall == false) {
      discard(*op);
    }
    known = known && inCall;
  }
  return known;
}

bool WatchedGroup::hasFailed() noexcept try {
  // The caller may have got an operation's end before the operation was polled.
  for (const auto& op : operations([](const WatchedOp& op) { return op.returned(); })) {
    if (const auto end = op->ask()) {
      endAsked(*op, *end);
    }
  }
  UniqueLock lock(mutex_);
  const auto told = failureTold_;
  lock.unlock();
  if (told.valid()) {
    waitRunning(told, kExplaining);
  }
  return told.valid();
} catch (const std::exception&) {
  return false;  // out of memory: the reason of an error may not be printed
}

void WatchedGroup::leave(const std::string& how) noexcept {
  hasFailed();  // finds the reason of an error before all have left, which erases all words
  UniqueLock lock(mutex_);
  const auto store = store_;
  lock.unlock();
  if (store) {
    left_words::leave(store, rank_, size_, how, inFlight_);
  }
}

void WatchedGroup::tellFailure(const Operation& op) noexcept try {
  LockGuard lock(mutex_);
  auto unfinished = ExitGuard::begin();
  if (!store_ || failureTold_.valid() || !unfinished) {
    return;
  }
  const auto done = std::make_shared<std::promise<void>>();
  failureTold_ = done->get_future();
  Monitor::get().runDetached([unfinished = std::move(unfinished), self = shared_from_this(),
                              store = store_, what = torchcomms_pg::describe(op), done]() mutable {
    dumpApart(*self);
    // It raises if the store has ended, for example with the rank that served it.
    attempt([&] { self->explainFailure(store, what); });
    done->set_value();
  });
} catch (const std::exception&) {
  // No thread can be started.
}

void WatchedGroup::explainFailure(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& what) const {
  RankWords processes(std::make_unique<StoreBoard>(store));
  std::vector<int> ranks;
  std::string why;
  for (RunningTime time(2 * kBetweenTries); why.empty() && time.at(Clock::now()) < kShowing;) {
    for (int rank = 0; rank < size_ && ranks.size() < kMostDead; ++rank) {
      const auto peer = Peer::parse(processes.of(rank).value_or(""));
      if (rank != rank_ && peer.dead() && !left_words::has(store, rank)) {
        ranks.push_back(rank);
        why += "; rank " + group_.numberOf(rank) + " (pid " + std::to_string(peer.pid) + ") died";
      }
    }
    const auto left = why.empty() ? left_words::first(store, group_) : std::nullopt;
    if (left && left->rank != rank_) {
      ranks = {left->rank};
      why = left->text;
    } else if (why.empty()) {
      std::this_thread::sleep_for(kBetweenTries);
    }
  }
  if (!why.empty()) {
    const auto text = "torchcomms_pg: " + what + " of group '" + group_.name + "' has failed" + why;
    printLine("[rank " + group_.numberOf(rank_) + "] " + printable(text));
    error_file::write(printable(text), globalRanksOf(*this, ranks));
  }
}

}  // namespace torchcomms_pg
