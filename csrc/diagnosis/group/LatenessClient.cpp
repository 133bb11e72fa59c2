#include "diagnosis/group/LatenessClient.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <iomanip>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/ExitGuard.hpp"
#include "base/PerProcess.hpp"
#include "base/TextStreams.hpp"
#include "diagnosis/rank/Fields.hpp"
#include "diagnosis/store/StoreBoard.hpp"
#include "handle/OwnProcess.hpp"
#include "monitor/Apart.hpp"
#include "monitor/Monitor.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg {

namespace {

// Shortest period on which a warning is based: chance may load one core for a few seconds.
constexpr double kWarnedSeconds = 10;

constexpr std::chrono::minutes kBetweenWarnings{1};

std::atomic<bool> warns{true};

// What this process's groups share.
struct Publishing {
  std::atomic<int> groups{0};  // that publish
  std::atomic<int> ranks{0};   // of the largest
  std::atomic<Clock::time_point> warnedAt{Clock::time_point(-kBetweenWarnings)};
};
PerProcess<Publishing> publishing;

// Returns whether this process may warn now, and records that it does.
bool takesWarning(Clock::time_point now) {
  auto& warnedAt = publishing.get().warnedAt;
  auto last = warnedAt.load();
  return now - last >= kBetweenWarnings && warnedAt.compare_exchange_strong(last, now);
}

}  // namespace

struct LatenessClient::State {
  State(
      const c10::intrusive_ptr<c10d::Store>& store, const std::string& place, Group of, int own,
      int ranks)
      : board(c10::make_intrusive<c10d::PrefixStore>("torchcomms_pg/late/" + place, store)),
        group(std::move(of)),
        rank(own),
        size(ranks) {
    auto& known = publishing.get();
    ++known.groups;
    known.ranks = std::max<int>(known.ranks, size);
  }
  ~State() {
    if (process.isThis()) {
      --publishing.get().groups;
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  StoreBoard board;  // the ranks' arrivals, by rank
  const std::shared_ptr<ArrivalLog> log = std::make_shared<ArrivalLog>();
  const OwnProcess process;
  const Group group;
  const int rank;
  const int size;
  std::atomic<bool> busy{false};    // a thread is publishing
  std::atomic<bool> gone{false};    // the store is gone
  std::atomic<bool> closed{false};  // the group has ended
  std::atomic<bool> published{false};
  AtomicShared<const Lateness> judged;  // null before the first judgement

  Clock::time_point due GUARDED_BY(monitorThread){};
  // Number of the latest published collective.
  uint64_t told GUARDED_BY(monitorThread) = 0;

  // State of the thread that publishes.
  std::optional<int> late;  // the late rank of the last judgement, if any

  void publish() {
    if (!closed) {
      published = true;
      board.set(std::to_string(rank), fields::write(log->get()));
    }
    if (closed) {
      takeBack();  // close() may have done so before the key was there
    }
  }

  // Returns what each rank has published; empty for a rank that has published nothing.
  std::vector<Arrivals> read() {
    std::vector<Arrivals> all(size);
    for (int each = 0; each < size; ++each) {
      if (each == rank) {
        all[each] = log->get();
      } else if (const auto text = board.get(std::to_string(each))) {
        all[each] = fields::read<Arrivals>(*text).value_or(Arrivals{});
      }
    }
    return all;
  }

  void takeBack() { board.erase(std::to_string(rank)); }

  void warn(Clock::time_point now) {
    const auto lateness = judgeLateness(read());
    if (!lateness.ranks.empty()) {  // ranks that end the group have withdrawn their arrivals
      judged.store(std::make_shared<const Lateness>(lateness));
    }
    const auto before = std::exchange(late, lateness.late);
    if (!late || late != before || lateness.seconds < kWarnedSeconds || closed ||
        !takesWarning(now)) {
      return;
    }
    const auto& found = lateness.ranks.at(*late);
    TextWriter text;
    text << "torchcomms_pg: " << group.rankName(*late) << " of group '" << group.name
         << "' is always late: all others wait for it " << std::fixed << std::setprecision(0)
         << 100 * found.share << " % of the time. It comes " << std::setprecision(1)
         << 1000 * found.later << " ms later to a collective than the others, by the last "
         << lateness.collectives << ", which took " << std::setprecision(0) << lateness.seconds
         << " s";
    printLine(text.str());
  }
};

void LatenessClient::setWarning(bool on) {
  warns = on;
}

void LatenessClient::open(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& place, Group group, int rank,
    int size) {
  if (size == 1 || store == nullptr) {
    return;
  }
  auto state = std::make_shared<State>(store, place, std::move(group), rank, size);
  log_ = state->log;
  state_.store(std::move(state));
  noting_.store(true, std::memory_order_release);
}

void LatenessClient::close() {
  noting_.store(false, std::memory_order_release);
  const auto state = state_.exchange({});
  if (state) {
    last_.store(state->judged.load());
  }
  if (!state || !state->process.isThis()) {
    return;  // nothing was opened, or this is a forked child: the connection is its parent's
  }
  state->closed = true;
  if (!state->published || state->gone) {
    return;
  }
  try {
    // It raises if the store ended with the rank that served it, and so did the key.
    Monitor::get().runDetached([unfinished = ExitGuard(), state] { state->takeBack(); });
  } catch (const std::exception&) {
    // No thread can be started: the key stays in the store.
  }
}

void LatenessClient::check(Clock::time_point now) noexcept {
  const auto state = state_.load();
  if (!state || now < state->due || state->busy || state->gone) {
    return;
  }
  const auto latest = state->log->latest();
  if (latest == state->told || latest <= kFewestBlocks) {
    return;
  }
  auto unfinished = ExitGuard::begin();
  if (!unfinished) {
    return;
  }
  state->due = now + publicationInterval(publishing.get().ranks, publishing.get().groups);
  state->told = latest;
  state->busy = true;
  try {
    Monitor::get().runDetached([unfinished = std::move(unfinished), state, now] {
      try {
        state->publish();
        if (state->rank == 0 && warns) {
          state->warn(now);
        }
      } catch (const std::exception&) {
        state->gone = true;
      }
      state->busy = false;
    });
  } catch (...) {
    state->busy = false;  // a later round tries again
  }
}

std::shared_ptr<const Lateness> LatenessClient::judged() const {
  const auto state = state_.load();
  return state ? state->judged.load() : last_.load();
}

Lateness LatenessClient::ask(const char* operation) const {
  const auto state = state_.load();
  const auto last = judged();
  if (!state && last) {
    return *last;
  }
  if (!state || !state->process.isThis()) {
    throw std::runtime_error(
        std::string(operation) +
        ": nothing is known of this group: it has ended, has one rank, is one of an accelerator "
        "or of the parent of this process, or its ranks share no store");
  }
  auto answer = apart([unfinished = ExitGuard(), state] { return judgeLateness(state->read()); });
  std::string why;
  try {
    if (answer.wait_for(kPatience) == std::future_status::ready) {
      auto found = answer.get();
      return found.ranks.empty() && last ? *last : found;
    }
  } catch (const std::exception& error) {
    why = std::string(": ") + error.what();
  }
  return last ? *last
              : throw std::runtime_error(
                    std::string(operation) + ": group '" + state->group.name +
                    "': the store does not answer, by which the ranks tell each other when they "
                    "come to collectives" +
                    why);
}

}  // namespace torchcomms_pg
