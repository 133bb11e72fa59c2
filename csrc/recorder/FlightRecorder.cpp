// The only file that includes torch's template c10d::FlightRecorder, which takes half a minute to
// compile.
#include "recorder/FlightRecorder.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/Mutex.hpp"
#include "base/TorchCompat.hpp"
#include "device/EventPoller.hpp"
#include "monitor/Compiling.hpp"

#include <torch/csrc/distributed/c10d/FlightRecorderDetail.hpp>

namespace torchcomms_pg {

namespace {

// Stands for an event: this recorder is notified of starts and ends, and queries no events.
struct NoEvent {
  bool query() const { return false; }
};
using Ring = c10d::FlightRecorder<NoEvent>;

// Prefix of operation names that every version of torch's analyser accepts. The analyser of torch
// 2.11 accepts only this prefix and xccl's.
constexpr const char* kPrefix = "nccl:";

// Time for which a dump waits for events of accelerators: the driver may hang.
constexpr std::chrono::milliseconds kDriverPatience{500};

// Keys that are not in c10d's schema; readers of the schema ignore them.
constexpr const char* kCompiling = "compiling";
constexpr const char* kDetails = "details";
constexpr const char* kCaptured = "captured";
constexpr const char* kDumped = "dumped";    // time of the dump, in ns since 1970
constexpr const char* kThreads = "threads";  // where Python's threads are, a text for each
constexpr const char* kInstructions = "instructions";

using Name = std::tuple<std::string, std::string>;
using Direction = OpRecord::Direction;

// Counts of the messages between this rank and a peer, or of one-sided operations on a peer.
struct Pair {
  Name name;
  bool first = false;  // true if this rank is the lower of the two
  size_t sent = 0;
  size_t received = 0;
};

// Name of a one-sided operation, or "" for messages; and the peer's rank in the group.
using PairKey = std::pair<std::string, int>;

}  // namespace

struct FlightRecorder::Group {
  size_t id = 0;
  Name name;
  std::string backend;
  std::vector<uint64_t> ranks;
  int rank = 0;
  size_t issued = 0;
  std::map<PairKey, Pair> pairs;
  // Sequence numbers of the latest collective in each state; -1 if none.
  std::atomic<int64_t> enqueued{-1};
  std::atomic<int64_t> started{-1};
  std::atomic<int64_t> completed{-1};
};

namespace {

// An operation's entry in the ring, with the numbers that only this recorder counts.
struct Slot {
  std::shared_ptr<const OpRecord> record;  // null if the entry is empty
  FlightRecorder::Group* group = nullptr;
  size_t id = 0;
  size_t opId = 0;
  int peer = -1;       // -1 for a collective, or while a message's sender is unknown
  size_t message = 0;  // number, from 1, among the messages to or from `peer`

  PairKey pair() const { return {record->direction == Direction::one ? record->op : "", peer}; }
};

}  // namespace

struct FlightRecorder::State {
  State(size_t maxEntries, bool cppStacks)
      : maxEntries(maxEntries), cppStacks(cppStacks), slots(maxEntries) {}

  const size_t maxEntries;
  const bool cppStacks;
  mutable Mutex mutex;  // never held while waiting for the GIL
  std::vector<Slot> slots GUARDED_BY(mutex);
  size_t next GUARDED_BY(mutex) = 0;
  size_t id GUARDED_BY(mutex) = 0;
  std::deque<Group> groups GUARDED_BY(mutex);  // a deque, so that their addresses are stable
  decltype(Ring::pg_name_to_ranks_) ranks GUARDED_BY(mutex);
  int rank GUARDED_BY(mutex) = -1;
  std::string library GUARDED_BY(mutex);
  std::atomic<int64_t> captured{0};

  Pair& pair(Group& group, const PairKey& key) REQUIRES(mutex) {
    const auto found = group.pairs.find(key);
    if (found != group.pairs.end()) {
      return found->second;
    }
    const auto& [op, peer] = key;
    const auto mine = group.ranks[group.rank];
    const auto other = group.ranks[peer];
    if (!op.empty()) {
      Pair made;
      made.name = group.name;
      const auto* const arrow = op == "wait_signal" ? "<-" : "->";
      std::get<0>(made.name) +=
          ":" + op + " " + std::to_string(mine) + arrow + std::to_string(other);
      ranks[made.name] = {mine};
      return group.pairs.emplace(key, std::move(made)).first->second;
    }
    std::vector<uint64_t> both{std::min(mine, other), std::max(mine, other)};
    Pair made;
    made.first = mine <= other;
    made.name = group.name;
    std::get<0>(made.name) += ":" + std::to_string(both[0]) + "-" + std::to_string(both[1]);
    if (mine == other) {
      both.pop_back();
    }
    ranks[made.name] = std::move(both);
    return group.pairs.emplace(key, std::move(made)).first->second;
  }

  void count(Slot& slot, int peer) REQUIRES(mutex) {
    slot.peer = peer;
    auto& messages = pair(*slot.group, slot.pair());
    slot.message =
        slot.record->direction == Direction::receive ? ++messages.received : ++messages.sent;
  }

  // Describes a message. The analyser takes a message's ranks as positions in its group, and finds
  // the peer's entry by the collective's sequence number. So both sides derive this number from the
  // count of messages in the same direction: odd if the lower rank sends, else even.
  static void describeMessage(const Slot& slot, Ring::Entry& entry) {
    const auto& group = *slot.group;
    const bool sends = slot.record->direction == Direction::send;
    auto& name = entry.profiling_name_;
    name = kPrefix;
    entry.p2p_seq_id_ = slot.record->seq;
    if (slot.peer < 0) {
      entry.pg_name_ = group.name;
      entry.collective_seq_id_ = 0;  // no collective has this number
      name += "recv " + std::to_string(group.rank) + "<-" + kUnknownSource;
      return;
    }
    const auto& messages = group.pairs.at(slot.pair());
    const bool upwards = sends == messages.first;
    const int mine = messages.first ? 0 : 1;
    const int other = slot.peer == group.rank ? mine : 1 - mine;
    entry.pg_name_ = messages.name;
    entry.collective_seq_id_ = 2 * slot.message - (upwards ? 1 : 0);
    name += sends ? "send " : "recv ";
    name += std::to_string(mine) + (sends ? "->" : "<-") + std::to_string(other);
  }

  Ring::Entry describe(const Slot& slot) const {
    const auto& record = *slot.record;
    const auto known = [](c10::time_t time) {
      return time == 0 ? std::nullopt : std::optional(time);
    };
    Ring::Entry entry{};
    entry.id_ = slot.id;
    entry.pg_id_ = slot.group->id;
    entry.op_id_ = slot.opId;
    entry.traceback_ = cppStacks ? record.cppStack : nullptr;
    entry.time_created_ = record.created;
    entry.timeout_ms_ = record.timeout.count();
    entry.isP2P_ = record.isMessage();
    entry.retired_ = record.retired.load(std::memory_order_acquire);
    entry.time_discovered_completed_ = known(record.completed.load(std::memory_order_acquire));
    const auto duration = record.duration.load(std::memory_order_relaxed);
    if (entry.time_discovered_completed_ && duration > 0) {
      entry.duration_ = duration;
    }
    entry.time_discovered_started_ = known(record.started.load(std::memory_order_relaxed));
    for (size_t i = 0; i < record.tensors.size(); ++i) {
      const auto& [dtype, dim] = record.tensors[i];
      const bool input = i < record.inputs;
      (input ? entry.input_dims_ : entry.output_dims_).push_back(dim);
      (input ? entry.input_dtypes_ : entry.output_dtypes_).push_back(dtype);
    }
    entry.sizes_.append(record.sizes.begin(), record.sizes.end());
    entry.thread_id_ = record.thread->id;
    entry.thread_name_ = record.thread->name;
    if (entry.isP2P_) {
      describeMessage(slot, entry);
    } else if (record.direction == Direction::one) {
      entry.pg_name_ = slot.group->pairs.at(slot.pair()).name;
      entry.collective_seq_id_ = slot.message;
      entry.p2p_seq_id_ = record.seq;
      entry.profiling_name_ = std::string(kPrefix) + "coalesced";  // the analyser ignores its sizes
    } else {
      entry.pg_name_ = slot.group->name;
      entry.collective_seq_id_ = record.seq;
      entry.profiling_name_ = std::string(kPrefix) + record.op;
    }
    return entry;
  }

  // Facts that c10d's entries have no field for. Values are numbers or texts.
  using Detail = std::vector<std::pair<std::string, c10::IValue>>;
  static Detail detail(const Slot& slot) {
    const auto& record = *slot.record;
    const auto& known = record.details;
    Detail told;
    told.emplace_back("record_id", static_cast<int64_t>(slot.id));
    if (!record.tensors.empty()) {
      told.emplace_back("device", c10::DeviceTypeName(record.device, /*lower_case=*/true));
    }
    if (!slot.group->backend.empty()) {
      told.emplace_back("backend", slot.group->backend);
    }
    if (record.isMessage()) {
      if (known.tag) {
        told.emplace_back("tag", static_cast<int64_t>(*known.tag));
      }
      if (known.batch) {
        told.emplace_back("batch", static_cast<int64_t>(*known.batch));
      }
      told.emplace_back("from_any", static_cast<int64_t>(record.peer < 0));
    }
    if (known.root >= 0) {
      told.emplace_back("root", static_cast<int64_t>(slot.group->ranks[known.root]));
    }
    if (known.reduceOp != nullptr) {
      told.emplace_back("reduce_op", known.reduceOp);
    }
    return told;
  }

  // Returns the groups whose status a dump has. A process group is one for each of its types of
  // device. Leaves out a group without operations if another one has its name and ranks: readers
  // take it for a group whose ranks may differ from those listed for the name.
  std::unordered_set<const Group*> listed() const REQUIRES(mutex) {
    std::unordered_set<const Group*> found;
    std::set<std::tuple<const decltype(Group::name)&, const decltype(Group::ranks)&>> known;
    for (const bool used : {true, false}) {
      for (const auto& group : groups) {
        if ((group.issued > 0) == used &&
            (known.insert(std::tie(group.name, group.ranks)).second || used)) {
          found.insert(&group);
        }
      }
    }
    return found;
  }

  // A copy of this recorder in the form of c10d's recorder, the oldest entry first.
  struct Snapshot {
    Ring ring;
    std::vector<Stack> stacks;  // Python's stacks of the entries
    std::vector<Detail> details;
    std::unordered_map<std::string, std::unordered_map<std::string, std::string>> comms;
  };
  std::unique_ptr<Snapshot> snapshot() const {
    auto copy = std::make_unique<Snapshot>();
    auto& to = copy->ring;
    to.enabled_ = true;
    LockGuard lock(mutex);
    to.max_entries_ = slots.size();
    for (size_t i = 0; i < slots.size(); ++i) {
      const auto& slot = slots[(next + i) % slots.size()];
      if (slot.record != nullptr) {
        to.entries_.push_back(describe(slot));
        copy->stacks.push_back(slot.record->stack);
        copy->details.push_back(detail(slot));
      }
    }
    to.pg_name_to_ranks_ = ranks;
    to.comm_lib_version_ = library;
    const auto listed = this->listed();
    for (const auto& group : groups) {
      if (!listed.contains(&group)) {
        continue;
      }
      auto status = std::make_shared<c10d::ProcessGroupStatus>();
      status->lastEnqueuedSeq = group.enqueued.load(std::memory_order_relaxed);
      status->lastStartedSeq = group.started.load(std::memory_order_relaxed);
      status->lastCompletedSeq = group.completed.load(std::memory_order_relaxed);
      to.all_pg_status_[group.id] = std::move(status);
      copy->comms[std::get<0>(group.name)] = {
          {"rank", std::to_string(group.rank)}, {"nRanks", std::to_string(group.ranks.size())}};
    }
    return copy;
  }
};

namespace {

using Frames = c10::List<c10::IValue>;

using PythonFrames = std::vector<std::vector<Frame>>;

// Returns the frames of each entry's stack, by the entry's id: C++ frames, if recorded, then
// Python's.
std::map<int64_t, Frames> describeStacks(
    const FlightRecorder::State::Snapshot& from, const PythonFrames& python) {
  std::map<int64_t, Frames> described;
  for (size_t i = 0; i < from.stacks.size(); ++i) {
    auto frames = c10d::new_list();
    const auto add = [&](const std::string& name, const std::string& file, int64_t line) {
      auto frame = c10d::new_dict();
      frame.insert(c10d::name_key, name);
      frame.insert(c10d::filename_key, file);
      frame.insert(c10d::line_key, line);
      frames.push_back(frame);
    };
    const auto& entry = from.ring.entries_[i];
    if (entry.traceback_) {
      const auto symbols = torch::symbolize({entry.traceback_.get()});
      for (const auto index : symbols.tracebacks.at(0)) {
        const auto& frame = symbols.all_frames.at(index);
        add(frame.funcname, frame.filename, static_cast<int64_t>(frame.lineno));
      }
    }
    for (const auto& frame : python[i]) {
      add(frame.name, frame.file, frame.line);
    }
    described.emplace(static_cast<int64_t>(entry.id_), std::move(frames));
  }
  return described;
}

// Returns where Python's frames were in their functions, for torchcomms_pg.trace: of each frame,
// the innermost first, the instruction and the function's first line.
std::string instructionsOf(const std::vector<Frame>& frames) {
  std::string text;
  for (const auto& frame : frames) {
    text += text.empty() ? "" : " ";
    text += std::to_string(frame.instruction) + ":" + std::to_string(frame.firstLine);
  }
  return text;
}

// Returns the details as elements of a JSON list. Texts are names of devices, reductions and
// backends, which need no escapes.
std::string jsonOf(const std::vector<FlightRecorder::State::Detail>& details) {
  std::string text;
  for (const auto& told : details) {
    text += text.empty() ? "{" : ", {";
    for (size_t i = 0; i < told.size(); ++i) {
      const auto& [key, value] = told[i];
      text += std::string(i == 0 ? "\"" : ", \"") + key + "\": ";
      text += value.isInt() ? std::to_string(value.toInt()) : '"' + value.toStringRef() + '"';
    }
    text += "}";
  }
  return text;
}

int64_t nowNs() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void addFrames(const Frames& entries, const std::map<int64_t, Frames>& described) {
  for (const c10::IValue& entry : entries) {
    auto dict = entry.toGenericDict();
    dict.insert(c10d::frames_key, described.at(dict.at(c10d::record_id_key).toInt()));
  }
}

}  // namespace

FlightRecorder::FlightRecorder(size_t maxEntries, bool cppStacks)
    : state_(std::make_unique<State>(maxEntries, cppStacks)) {}

FlightRecorder::~FlightRecorder() = default;

FlightRecorder::Group* FlightRecorder::addGroup(
    const std::string& name, const std::string& description, const std::string& backend,
    const std::vector<int64_t>& ranks, int rank) {
  LockGuard lock(state_->mutex);
  auto& group = state_->groups.emplace_back();
  group.id = state_->groups.size() - 1;
  group.name = {name, description};
  group.backend = backend;
  group.ranks.assign(ranks.begin(), ranks.end());
  group.rank = rank;
  state_->ranks[group.name] = group.ranks;
  if (state_->rank < 0) {
    state_->rank = static_cast<int>(group.ranks[rank]);
  }
  return &group;
}

void FlightRecorder::setLibraryVersion(const std::string& version) {
  LockGuard lock(state_->mutex);
  state_->library = version;
}

size_t FlightRecorder::add(Group& group, std::shared_ptr<const OpRecord> record) {
  const auto& added = *record;
  if (added.isCollective()) {
    group.enqueued.store(static_cast<int64_t>(added.seq), std::memory_order_relaxed);
    if (added.started.load(std::memory_order_relaxed) != 0) {
      start(group, added);
    }
  }
  LockGuard lock(state_->mutex);
  const auto place = state_->next;
  state_->next = place + 1 == state_->slots.size() ? 0 : place + 1;
  auto& slot = state_->slots[place];
  slot.record.swap(record);  // the old record is freed after the lock is released
  slot.group = &group;
  slot.id = state_->id++;
  slot.opId = ++group.issued;
  slot.peer = -1;
  if (added.peer >= 0) {
    state_->count(slot, added.peer);
  }
  // Prefetches the record that the next call will release, since it is no longer in the caches.
  __builtin_prefetch(state_->slots[state_->next].record.get(), /*write=*/1);
  return place;
}

void FlightRecorder::start(Group& group, const OpRecord& record) {
  if (record.isCollective()) {
    group.started.store(static_cast<int64_t>(record.seq), std::memory_order_relaxed);
  }
}

void FlightRecorder::complete(Group& group, const OpRecord& record, size_t place, int source) {
  if (record.isCollective()) {
    group.completed.store(static_cast<int64_t>(record.seq), std::memory_order_relaxed);
  } else if (record.peer < 0 && source >= 0) {
    LockGuard lock(state_->mutex);
    auto& slot = state_->slots[place];
    if (slot.record.get() == &record) {
      state_->count(slot, source);
    }
  }
}

void FlightRecorder::noteCaptured() {
  state_->captured.fetch_add(1, std::memory_order_relaxed);
}

bool FlightRecorder::enabled() const {
  return state_->maxEntries > 0;
}

bool FlightRecorder::cppStacks() const {
  return state_->cppStacks;
}

size_t FlightRecorder::size() const {
  LockGuard lock(state_->mutex);
  return std::count_if(state_->slots.begin(), state_->slots.end(), [](const Slot& slot) {
    return slot.record != nullptr;
  });
}

void FlightRecorder::reset() {
  std::vector<Slot> slots(state_->maxEntries);  // freed after the lock is released
  LockGuard lock(state_->mutex);
  state_->slots.swap(slots);
  state_->next = 0;
  state_->id = 0;
}

int FlightRecorder::rank() const {
  LockGuard lock(state_->mutex);
  return state_->rank;
}

std::vector<FlightRecorder::Recent> FlightRecorder::recent(
    const std::string& group, int64_t rank) const {
  std::vector<Recent> found;
  const auto& state = *state_;
  LockGuard lock(state.mutex);
  const Group* latest = nullptr;
  for (size_t i = 0; i < state.slots.size(); ++i) {
    const auto& slot = state.slots[(state.next + state.slots.size() - 1 - i) % state.slots.size()];
    if (slot.record == nullptr || !slot.record->isCollective()) {
      continue;
    }
    const auto& in = *slot.group;
    if (latest == nullptr && std::get<0>(in.name) == group &&
        in.ranks[in.rank] == static_cast<uint64_t>(rank)) {
      latest = &in;
    }
    if (&in == latest) {
      const auto& record = *slot.record;
      found.push_back({record.seq, record.op, record.thread->id, record.created, record.stack});
    }
  }
  std::ranges::reverse(found);
  return found;
}

std::string FlightRecorder::json(What what) const {
  EventPoller::askNow(kDriverPatience);
  const auto from = state_->snapshot();
  auto text = from->ring.dump_json(from->comms, what.entries, !what.completed);
  const auto end = text.rfind('}');
  if (end == std::string::npos) {
    return text;
  }
  std::string more = ", \"" + std::string(kDumped) + "\": " + std::to_string(nowNs());
  if (const auto captured = state_->captured.load(std::memory_order_relaxed); captured > 0) {
    more += ", \"" + std::string(kCaptured) + "\": " + std::to_string(captured);
  }
  if (what.entries) {
    more += ", \"" + std::string(kDetails) + "\": [" + jsonOf(from->details) + "]";
  }
  const auto intervals = Compiling::intervals();
  if (intervals.empty()) {
    return text.substr(0, end) + more + text.substr(end);
  }
  std::string compiling;
  for (const auto& [trigger, begin, finish] : intervals) {
    compiling += (compiling.empty() ? "" : ", ") + std::string("{\"trigger\": \"") + trigger +
                 "\", \"time_begin_ns\": " + std::to_string(begin) +
                 ", \"time_end_ns\": " + (finish == 0 ? "null" : std::to_string(finish)) + "}";
  }
  return text.substr(0, end) + more + ", \"" + kCompiling + "\": [" + compiling + "]" +
         text.substr(end);
}

// Does what c10d::FlightRecorder::dump() does, but with this recorder's stacks and additional keys.
std::string FlightRecorder::pickle(What what) const {
  EventPoller::askNow(kDriverPatience);
  const auto from = state_->snapshot();
  auto& ring = from->ring;
  auto result = c10d::new_dict();
  result.insert(c10d::version_key, c10d::version_val);
  result.insert(c10d::pg_config_key, ring.getPgConfig());
  result.insert(c10d::comm_lib_version_key_str, ring.comm_lib_version_);
  result.insert(c10d::pg_status_key, ring.getPgStatus());
  result.insert(kDumped, nowNs());
  if (auto* const source = StackSource::get(); source && what.stacks && what.threads) {
    auto lines = c10d::new_list();
    for (auto& line : source->threads()) {
      lines.push_back(std::move(line));
    }
    result.insert(kThreads, lines);
  }
  if (what.entries) {
    const auto entries = ring.getCollectiveTrace(/*includeStacktraces=*/false, !what.completed);
    PythonFrames python(from->stacks.size());
    if (what.stacks) {
      if (auto* const source = StackSource::get()) {
        python = source->describe(from->stacks);
      }
      addFrames(entries, describeStacks(*from, python));
    }
    result.insert(c10d::entries_key, entries);
    auto details = c10d::new_list();
    for (size_t i = 0; i < from->details.size(); ++i) {
      const auto& told = from->details[i];
      auto detail = c10d::new_dict();
      for (const auto& [key, value] : told) {
        detail.insert(key, value);
      }
      if (!python[i].empty()) {
        detail.insert(kInstructions, instructionsOf(python[i]));
      }
      details.push_back(detail);
    }
    result.insert(kDetails, details);
  }
  if (const auto captured = state_->captured.load(std::memory_order_relaxed); captured > 0) {
    result.insert(kCaptured, captured);
  }
  if (!from->comms.empty()) {
    auto comms = c10d::new_dict();
    for (const auto& [name, state] : from->comms) {
      auto comm = c10d::new_dict();
      for (const auto& [key, value] : state) {
        comm.insert(key, value);
      }
      comms.insert(name, comm);
    }
    result.insert(c10d::nccl_comm_key, comms);
  }
  if (const auto intervals = Compiling::intervals(); !intervals.empty()) {
    auto compiling = c10d::new_list();
    for (const auto& [trigger, begin, finish] : intervals) {
      auto interval = c10d::new_dict();
      interval.insert("trigger", trigger);
      interval.insert("time_begin_ns", begin);
      interval.insert("time_end_ns", finish == 0 ? c10::IValue() : c10::IValue(finish));
      compiling.push_back(interval);
    }
    result.insert(kCompiling, compiling);
  }
  return c10d::pickle_str(result);
}

}  // namespace torchcomms_pg
