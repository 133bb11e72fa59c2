// The only file that includes torch's template: it takes half a minute to compile.
#include "recorder/Recorder.hpp"

#include <c10/util/thread_name.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "comm/TorchCompat.hpp"
#include "monitor/Compiling.hpp"

#include <torch/csrc/distributed/c10d/FlightRecorderDetail.hpp>

namespace torchcomms_pg {

namespace {

// The recorder is told of starts and ends: there is no event to ask.
struct NoEvent {
  bool query() const { return false; }
};
using Ring = c10d::FlightRecorder<NoEvent>;

// torch's analyser refuses every other prefix, in 2.11 all but this and xccl;
// and what is recorded are operations of NCCL's API.
constexpr const char* kPrefix = "nccl:";

// Beside c10d's keys; readers of the schema pass over it.
constexpr const char* kCompiling = "compiling";

// A receive whose source is not known yet; the analyser takes "?" from 2.15 on.
constexpr const char* kAnySource = TORCHCOMMS_PG_TORCH_AT_LEAST(15) ? "?" : "-1";

// The messages between this rank and another.
struct Pair {
  std::tuple<std::string, std::string> name;
  bool first = false;  // whether this rank is the lower one
  size_t sent = 0;
  size_t received = 0;
};

struct RecordedGroup {
  std::tuple<std::string, std::string> name;
  std::vector<uint64_t> ranks;
  int rank = 0;
  size_t issued = 0;
  std::shared_ptr<c10d::ProcessGroupStatus> status;
  std::map<int, Pair> pairs;  // by peer
};

struct Thread {
  std::thread::id id = std::this_thread::get_id();
  std::string name = c10::getThreadName();  // a system call
};

const Thread& thisThread() {
  static thread_local const Thread thread;
  return thread;
}

void describeTensors(
    const std::vector<at::Tensor>& tensors,
    bool join,
    c10::SmallVector<int64_t, 4>& dims,
    std::vector<c10::ScalarType>& dtypes,
    c10::SmallVector<int64_t, 8>& sizes) {
  dims.clear();
  dtypes.clear();
  if (join && tensors.size() > 1) {
    const auto& first = tensors.front();
    dtypes.push_back(first.scalar_type());
    const bool alike = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      return tensor.sizes() == first.sizes();
    });
    if (alike) {
      dims.push_back(first.dim() + 1);
      sizes.push_back(static_cast<int64_t>(tensors.size()));
      sizes.append(first.sizes().begin(), first.sizes().end());
    } else {
      int64_t total = 0;
      for (const auto& tensor : tensors) {
        total += tensor.numel();
      }
      dims.push_back(1);
      sizes.push_back(total);
    }
    return;
  }
  for (const auto& tensor : tensors) {
    dtypes.push_back(tensor.scalar_type());
    dims.push_back(tensor.dim());
    sizes.append(tensor.sizes().begin(), tensor.sizes().end());
  }
}

}  // namespace

struct Recorder::State {
  // Guarded by the ring's mutex. Nothing that could wait for
  // the GIL happens under it.
  Ring ring;
  std::vector<Stack> stacks;  // Python's, by slot of the ring
  std::vector<RecordedGroup> groups;
  int rank = -1;

  Ring::Entry* find(const Place& place) {
    if (place.slot >= ring.entries_.size()) {
      return nullptr;
    }
    auto& entry = ring.entries_[place.slot];
    return entry.id_ == place.id && entry.reset_epoch_ == place.epoch ? &entry : nullptr;
  }

  Pair& pair(RecordedGroup& group, int peer) {
    const auto found = group.pairs.find(peer);
    if (found != group.pairs.end()) {
      return found->second;
    }
    const auto mine = group.ranks[group.rank];
    const auto other = group.ranks[peer];
    std::vector<uint64_t> ranks{std::min(mine, other), std::max(mine, other)};
    Pair made;
    made.first = mine <= other;
    made.name = group.name;
    std::get<0>(made.name) += ":" + std::to_string(ranks[0]) + "-" + std::to_string(ranks[1]);
    if (mine == other) {
      ranks.pop_back();
    }
    ring.pg_name_to_ranks_[made.name] = std::move(ranks);
    return group.pairs.emplace(peer, std::move(made)).first->second;
  }

  // The analyser reads a message's ranks as positions in its group, and finds
  // the other side's entry by the number of the collective. So that is what
  // both sides count: the messages of one direction.
  void describeMessage(Ring::Entry& entry, RecordedGroup& group, Direction direction, int peer) {
    const bool sends = direction == Direction::send;
    auto& name = entry.profiling_name_;
    name = kPrefix;
    if (peer < 0) {
      entry.pg_name_ = group.name;
      entry.collective_seq_id_ = 0;  // no collective has it
      name += "recv " + std::to_string(group.rank) + "<-" + kAnySource;
      return;
    }
    auto& messages = pair(group, peer);
    const auto count = sends ? ++messages.sent : ++messages.received;
    const bool upwards = sends == messages.first;
    const int mine = messages.first ? 0 : 1;
    const int other = peer == group.rank ? mine : 1 - mine;
    entry.pg_name_ = messages.name;
    entry.collective_seq_id_ = 2 * count - (upwards ? 1 : 0);
    name += sends ? "send " : "recv ";
    name += std::to_string(mine) + (sends ? "->" : "<-") + std::to_string(other);
  }

  // A ring that nobody else uses, with its oldest entry first: c10d's dumps
  // read the groups without a lock.
  struct Snapshot {
    Ring ring;
    std::vector<Stack> stacks;
  };
  std::unique_ptr<Snapshot> snapshot() {
    auto copy = std::make_unique<Snapshot>();
    auto& to = copy->ring;
    std::lock_guard lock(ring.mutex_);
    to.enabled_ = true;
    to.max_entries_ = ring.max_entries_;
    const auto count = ring.entries_.size();
    for (size_t i = 0; i < count; ++i) {
      const auto slot = (ring.next_ + i) % count;
      if (ring.entries_[slot].reset_epoch_ == ring.reset_epoch_) {
        to.entries_.push_back(ring.entries_[slot]);
        to.entries_.back().reset_epoch_ = to.reset_epoch_;
        copy->stacks.push_back(stacks[slot]);
      }
    }
    to.pg_name_to_ranks_ = ring.pg_name_to_ranks_;
    for (size_t id = 0; id < groups.size(); ++id) {
      to.all_pg_status_[id] = std::make_shared<c10d::ProcessGroupStatus>(*groups[id].status);
    }
    return copy;
  }
};

namespace {

using Frames = c10::List<c10::IValue>;

// By the number of the entry: those of C++, if recorded, then those of Python.
std::map<int64_t, Frames> describeStacks(const Recorder::State::Snapshot& from) {
  std::vector<std::vector<Frame>> python(from.stacks.size());
  if (auto* const source = StackSource::get()) {
    python = source->describe(from.stacks);
  }
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

void addFrames(const Frames& entries, const std::map<int64_t, Frames>& described) {
  for (const c10::IValue& entry : entries) {
    auto dict = entry.toGenericDict();
    dict.insert(c10d::frames_key, described.at(dict.at(c10d::record_id_key).toInt()));
  }
}

}  // namespace

Recorder::Recorder(size_t maxEntries, bool cppStacks) : state_(std::make_unique<State>()) {
  auto& ring = state_->ring;
  ring.max_entries_ = maxEntries;
  ring.enabled_ = maxEntries > 0;
  ring.capture_cpp_stack_ = cppStacks;
  ring.entries_.reserve(maxEntries);
  state_->stacks.resize(maxEntries);
}

Recorder::~Recorder() = default;

Recorder::GroupId Recorder::addGroup(
    const std::string& name,
    const std::string& description,
    const std::vector<int64_t>& ranks,
    int rank) {
  RecordedGroup group;
  group.name = {name, description};
  group.ranks.assign(ranks.begin(), ranks.end());
  group.rank = rank;
  group.status = std::make_shared<c10d::ProcessGroupStatus>();
  std::lock_guard lock(state_->ring.mutex_);
  state_->ring.pg_name_to_ranks_[group.name] = group.ranks;
  if (state_->rank < 0) {
    state_->rank = static_cast<int>(group.ranks[rank]);
  }
  state_->groups.push_back(std::move(group));
  return state_->groups.size() - 1;
}

Recorder::Place Recorder::add(GroupId id, const Issue& issue, Stack stack) {
  const auto& thread = thisThread();
  const auto now = c10::getTime();
  auto& ring = state_->ring;
  std::shared_ptr<torch::CapturedTraceback> cpp;
  if (C10_UNLIKELY(ring.capture_cpp_stack_)) {
    cpp = torch::CapturedTraceback::gather(/*python=*/false, /*script=*/true, /*cpp=*/true);
  }
  std::lock_guard lock(ring.mutex_);
  auto& group = state_->groups[id];
  const Place place{ring.next_, ring.id_++, ring.reset_epoch_};
  ring.next_ = (ring.next_ + 1) % ring.max_entries_;
  if (ring.entries_.size() == place.slot) {
    ring.entries_.emplace_back();
  }
  // In the old entry's memory: an allocation costs as much as all the rest.
  auto& entry = ring.entries_[place.slot];
  entry.id_ = place.id;
  entry.reset_epoch_ = place.epoch;
  entry.pg_id_ = id;
  entry.op_id_ = ++group.issued;
  entry.traceback_.swap(cpp);  // the old ones are freed after the lock is released
  state_->stacks[place.slot].swap(stack);
  entry.start_ = entry.end_ = nullptr;
  entry.time_created_ = now;
  entry.timeout_ms_ = issue.timeout.count();
  entry.isP2P_ = issue.direction != Direction::none;
  entry.duration_.reset();
  entry.time_discovered_started_ = issue.started ? std::optional(now) : std::nullopt;
  entry.time_discovered_completed_.reset();
  entry.retired_ = false;
  entry.thread_id_ = thread.id;
  entry.thread_name_ = thread.name;
  entry.sizes_.clear();
  describeTensors(issue.inputs, issue.join, entry.input_dims_, entry.input_dtypes_, entry.sizes_);
  describeTensors(
      issue.outputs, issue.join, entry.output_dims_, entry.output_dtypes_, entry.sizes_);
  if (entry.isP2P_) {
    entry.p2p_seq_id_ = issue.seq;
    state_->describeMessage(entry, group, issue.direction, issue.peer);
    return place;
  }
  entry.pg_name_ = group.name;
  entry.p2p_seq_id_ = 0;
  entry.collective_seq_id_ = issue.seq;
  entry.profiling_name_ = kPrefix;
  entry.profiling_name_ += issue.op;
  group.status->lastEnqueuedSeq = static_cast<int64_t>(issue.seq);
  if (issue.started) {
    group.status->lastStartedSeq = static_cast<int64_t>(issue.seq);
  }
  return place;
}

void Recorder::start(GroupId id, const Place& place) {
  const auto now = c10::getTime();
  std::lock_guard lock(state_->ring.mutex_);
  auto* const entry = state_->find(place);
  if (entry == nullptr || entry->time_discovered_started_) {
    return;
  }
  entry->time_discovered_started_ = now;
  if (!entry->isP2P_) {
    state_->groups[id].status->lastStartedSeq = static_cast<int64_t>(entry->collective_seq_id_);
  }
}

void Recorder::end(
    GroupId id, const Place& place, bool completed, std::optional<float> milliseconds, int source) {
  const auto now = c10::getTime();
  std::lock_guard lock(state_->ring.mutex_);
  auto* const entry = state_->find(place);
  if (entry == nullptr) {
    return;
  }
  entry->retired_ = true;
  if (!completed) {
    return;  // c10d: an entry that is retired and not completed has failed
  }
  if (!entry->time_discovered_started_) {
    entry->time_discovered_started_ = now;
  }
  entry->time_discovered_completed_ = now;
  entry->duration_ = milliseconds;
  auto& group = state_->groups[id];
  if (!entry->isP2P_) {
    group.status->lastCompletedSeq = static_cast<int64_t>(entry->collective_seq_id_);
  } else if (entry->collective_seq_id_ == 0 && source >= 0) {
    state_->describeMessage(*entry, group, Direction::receive, source);
  }
}

bool Recorder::enabled() const {
  return state_->ring.enabled_;
}

size_t Recorder::size() const {
  std::lock_guard lock(state_->ring.mutex_);
  const auto& entries = state_->ring.entries_;
  return std::count_if(entries.begin(), entries.end(), [&](const auto& entry) {
    return entry.reset_epoch_ == state_->ring.reset_epoch_;
  });
}

void Recorder::reset() {
  state_->ring.reset_all();
}

int Recorder::rank() const {
  std::lock_guard lock(state_->ring.mutex_);
  return state_->rank;
}

std::string Recorder::json(What what) const {
  auto text = state_->snapshot()->ring.dump_json(std::nullopt, what.entries, !what.completed);
  const auto intervals = Compiling::intervals();
  const auto end = text.rfind('}');
  if (intervals.empty() || end == std::string::npos) {
    return text;
  }
  std::string compiling;
  for (const auto& [trigger, begin, finish] : intervals) {
    compiling += (compiling.empty() ? "" : ", ") + std::string("{\"trigger\": \"") + trigger +
                 "\", \"time_begin_ns\": " + std::to_string(begin) +
                 ", \"time_end_ns\": " + (finish == 0 ? "null" : std::to_string(finish)) + "}";
  }
  return text.substr(0, end) + ", \"" + kCompiling + "\": [" + compiling + "]" + text.substr(end);
}

// As FlightRecorder::dump(), with other stacks.
std::string Recorder::pickle(What what) const {
  const auto from = state_->snapshot();
  auto& ring = from->ring;
  auto result = c10d::new_dict();
  result.insert(c10d::version_key, c10d::version_val);
  result.insert(c10d::pg_config_key, ring.getPgConfig());
  result.insert(c10d::comm_lib_version_key_str, ring.comm_lib_version_);
  result.insert(c10d::pg_status_key, ring.getPgStatus());
  if (what.entries) {
    const auto entries = ring.getCollectiveTrace(/*includeStacktraces=*/false, !what.completed);
    if (what.stacks) {
      addFrames(entries, describeStacks(*from));
    }
    result.insert(c10d::entries_key, entries);
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
