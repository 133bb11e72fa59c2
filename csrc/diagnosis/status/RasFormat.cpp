#include "diagnosis/status/RasFormat.hpp"

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/Text.hpp"
#include "diagnosis/status/Json.hpp"
#include "host/Process.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg::status {

namespace {

// NCCL's values for an unknown number and an unknown host.
constexpr int kUnknown = -1;
constexpr const char* kUnknownHost = "unknown";

// The error code of every failed group, for any reason: NCCL's ncclRemoteError.
constexpr int kFailed = 6;

// Limit of the elements of a list in a report that is not verbose.
constexpr size_t kMostListed = 10;

// The states of a communicator's ranks, as bits; the highest is shown if ranks differ. The
// communicator's problems, as bits. The names are NCCL's.
enum State : unsigned { kNoComm = 1, kRunning = 2, kAbort = 4 };
enum Wrong : unsigned { kMismatch = 1, kError = 2, kIncomplete = 4 };

const char* nameOf(unsigned states) {
  return (states & kAbort) != 0 ? "ABORT" : (states & kRunning) != 0 ? "RUNNING" : "NOCOMM";
}

std::string namesOf(unsigned wrong) {
  std::string names;
  for (const auto& [bit, name] :
       {std::pair(kIncomplete, "INCOMPLETE"), {kError, "ERROR"}, {kMismatch, "MISMATCH"}}) {
    if ((wrong & bit) != 0) {
      names += (names.empty() ? "" : ",") + std::string(name);
    }
  }
  return names.empty() ? "OK" : names;
}

uint64_t countOf(const MemberStatus& member, size_t kind) {
  return kind < member.launched.size() ? member.launched[kind] : 0;
}

unsigned stateOf(const MemberStatus& member) {
  return member.failure.empty() ? kRunning : kAbort;
}

// A rank that has not reported on a communicator.
struct MissingRank {
  int rank = 0;
  std::string host = kUnknownHost;
  int64_t pid = kUnknown;
  bool unresponsive = true;  // false if its process answers, but is not in the group
  bool dead = false;
  std::string why;
};

// A group, as RAS shows it.
struct Communicator {
  const Job::Group* group = nullptr;
  size_t size = 0;
  std::vector<MissingRank> missing;
  size_t nodes = 0;
  size_t leastPerNode = 0;
  size_t mostPerNode = 0;
  unsigned states = 0;
  unsigned wrong = 0;

  Communicator(const Job& job, const Job::Group& of) : group(&of), size(of.any->ranks.size()) {
    findMissing(job);
    std::map<std::string, size_t> perNode;
    for (const auto& [rank, member] : of.members) {
      ++perNode[member.process->host];
      states |= stateOf(*member.told);
      wrong |= member.told->failure.empty() ? 0u : kError;
      for (size_t kind = 0; kind < std::size(kLaunchKinds); ++kind) {
        const auto& first = *of.members.begin()->second.told;
        wrong |= countOf(*member.told, kind) == countOf(first, kind) ? 0u : kMismatch;
      }
    }
    wrong |= std::popcount(states) > 1 ? kMismatch : 0u;
    nodes = perNode.size();
    const auto [least, most] =
        std::ranges::minmax_element(perNode, {}, [](const auto& node) { return node.second; });
    leastPerNode = least->second;
    mostPerNode = most->second;
  }

  // Returns the values that all communicators in a row of the table share.
  auto row() const { return std::tuple(size, nodes, std::bit_width(states), wrong); }
  std::string id() const {
    const auto& any = *group->any;
    const auto of = [](const std::string& text) {
      return host::hashBytes(text.data(), text.size());
    };
    char text[64];
    std::snprintf(
        text,
        sizeof text,
        "0x%llx:0x%llx",
        static_cast<unsigned long long>(of(any.backend)),
        static_cast<unsigned long long>(of(any.name)));
    return text;
  }

 private:
  void findMissing(const Job& job) {
    for (int rank = 0; rank < static_cast<int>(size); ++rank) {
      if (group->members.contains(rank)) {
        continue;
      }
      const auto number = group->any->ranks[rank];
      MissingRank each;
      each.rank = rank;
      each.why = job.silentOf(group->id, number).text;
      if (const auto* const quiet = job.quietOf(group->id, number)) {
        each.host = nameOfHost(quiet->host->host);
        each.pid = quiet->process->pid;
        each.dead = quiet->process->state == "dead";
      } else if (const auto* const other = job.elsewhere(number)) {
        each.host = printable(other->process->host);
        each.pid = other->process->pid;
        each.unresponsive = false;
      }
      if (each.unresponsive) {
        wrong |= kIncomplete;
      } else {
        states |= kNoComm;
      }
      missing.push_back(std::move(each));
    }
  }
};

// Returns the communicators in the table's order: the largest first, and within a row the ones with
// the most missing ranks first.
std::vector<Communicator> communicatorsOf(const Job& job) {
  std::vector<Communicator> all;
  for (const auto* const group : job.groups()) {
    all.emplace_back(job, *group);
  }
  std::ranges::stable_sort(all, [](const auto& one, const auto& other) {
    return std::pair(other.row(), one.group->members.size()) <
           std::pair(one.row(), other.group->members.size());
  });
  return all;
}

size_t timeoutsOf(const Job& job) {
  const auto silent = std::ranges::count_if(
      job.quiet(), [](const auto& quiet) { return quiet.process->state == "silent"; });
  return job.unreached().size() + static_cast<size_t>(silent);
}

std::string versionOf(const Job& job) {
  return "unknown (torchcomms_pg " + printable(job.version()) + ")";
}

std::string hex(const char* form, uint64_t number) {
  char text[32];
  std::snprintf(text, sizeof text, form, static_cast<unsigned long long>(number));
  return text;
}

// The report for people.
class Text {
 public:
  Text(const Job& job, bool verbose)
      : job_(job), verbose_(verbose), communicators_(communicatorsOf(job)) {}

  std::string write() {
    add("NCCL version %s compiled with CUDA unknown\n", versionOf(job_).c_str());
    add("CUDA runtime version %d, driver version %d\n\n", kUnknown, kUnknown);
    writeSummary();
    writeTable();
    text_ += "\nErrors\n======\n\n";
    writeProcesses();
    forEach([&](const auto& communicator, const auto& name) { writeErrors(communicator, name); });
    text_ += "Warnings\n========\n\n";
    writeTimeouts();
    forEach([&](const auto& communicator, const auto& name) { writeWarnings(communicator, name); });
    return std::move(text_);
  }

 private:
  __attribute__((format(printf, 2, 3))) void add(const char* form, ...) {
    va_list values;
    va_start(values, form);
    char line[1024];
    std::vsnprintf(line, sizeof line, form, values);
    va_end(values);
    text_ += line;
  }

  void writeSummary() {
    std::map<std::string, std::set<uint32_t>> nodes;
    for (const auto& rank : job_.ranks()) {
      nodes[printable(rank.process->host)].insert(rank.process->pid);
    }
    for (const auto& quiet : job_.quiet()) {
      nodes[nameOfHost(quiet.host->host)].insert(quiet.process->pid);
    }
    std::map<size_t, size_t, std::greater<>> nodesWith;  // by number of processes
    size_t processes = 0;
    for (const auto& [host, pids] : nodes) {
      ++nodesWith[pids.size()];
      processes += pids.size();
    }
    text_ += "Job summary\n===========\n\n";
    if (nodesWith.size() == 1) {
      add("  Nodes  Processes         GPUs  Processes     GPUs\n"
          "(total)   per node  per process    (total)  (total)\n"
          "%7zu  %9zu  %11d  %9zu  %7d\n",
          nodes.size(),
          nodesWith.begin()->first,
          kUnknown,
          processes,
          kUnknown);
    } else {
      add("  Nodes  Processes         GPUs\n"
          "          per node  per process\n");
      for (const auto& [with, count] : nodesWith) {
        add("%7zu  %9zu  %11d\n", count, with, kUnknown);
      }
      add("\n"
          "  Nodes  Processes         GPUs\n"
          "(total)    (total)      (total)\n"
          "%7zu  %9zu  %11d\n",
          nodes.size(),
          processes,
          kUnknown);
    }
  }

  // Calls `body` with each communicator and its name in the report, "#ROW-PLACE (ID)".
  template <class Body>
  void forEach(Body&& body) {
    size_t row = 0;
    size_t place = 0;
    for (size_t i = 0; i < communicators_.size(); ++i) {
      if (i > 0) {
        const bool next = communicators_[i].row() != communicators_[i - 1].row();
        row += next ? 1 : 0;
        place = next ? 0 : place + 1;
      }
      body(
          communicators_[i],
          "#" + std::to_string(row) + "-" + std::to_string(place) +
              hex(" (%016llx)", communicators_[i].group->id));
    }
  }

  void writeTable() {
    add("\nCommunicators... (%.3fs)\n=============\n\n",
        static_cast<double>(job_.question().tookMs) / 1000);
    if (communicators_.empty()) {
      text_ += "There are none.\n";
      return;
    }
    add("Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    #  in group  per comm  per node  per comm  in group\n");
    for (auto first = communicators_.begin(); first != communicators_.end();) {
      const auto end = std::find_if(first, communicators_.end(), [&](const auto& each) {
        return each.row() != first->row();
      });
      auto least = first->leastPerNode;
      auto most = first->mostPerNode;
      std::set<const RankActivity*> ranks;
      for (auto each = first; each != end; ++each) {
        least = std::min(least, each->leastPerNode);
        most = std::max(most, each->mostPerNode);
        for (const auto& [rank, member] : each->group->members) {
          ranks.insert(member.activity);
        }
      }
      const auto perNode =
          std::to_string(least) + (least == most ? "" : "-" + std::to_string(most));
      add("%5zu  %8zu  %8zu  %8s  %8zu  %8zu  %8s  %6s\n",
          rows_++,
          static_cast<size_t>(end - first),
          first->nodes,
          perNode.c_str(),
          first->size,
          ranks.size(),
          nameOf(first->states),
          namesOf(first->wrong).c_str());
      first = end;
    }
  }

  // Writes the line that `describe` returns for each element, up to kMostListed unless verbose.
  template <class All, class Describe>
  void writeList(const All& all, Describe&& describe) {
    size_t listed = 0;
    for (const auto& each : all) {
      if (!verbose_ && listed == kMostListed) {
        text_ += "  ... and " + std::to_string(all.size() - listed) + " more\n";
        break;
      }
      ++listed;
      text_ += "  " + describe(each) + "\n";
    }
  }

  void writeProcesses() {
    std::vector<Job::Quiet> silent;
    std::vector<Job::Quiet> dead;
    for (const auto& quiet : job_.quiet()) {
      (quiet.process->state == "dead" ? dead : silent).push_back(quiet);
    }
    for (const auto& [name, all, what] :
         {std::tuple("INCOMPLETE", &silent, "do not answer"), {"DEAD", &dead, "are dead"}}) {
      if (all->empty()) {
        continue;
      }
      add("%s\n  Processes that %s: %zu\n", name, what, all->size());
      writeList(*all, [](const auto& quiet) {
        return "Process " + std::to_string(quiet.process->pid) + " on node " +
               nameOfHost(quiet.host->host) + ": " + printable(quiet.process->text);
      });
      text_ += '\n';
    }
  }

  static std::string describe(int rank, int64_t pid, const std::string& host) {
    return "Rank " + std::to_string(rank) +
           (pid < 0 ? "" : " -- process " + std::to_string(pid) + " on node " + host);
  }

  // Begins the section about a communicator's problem.
  void head(const Communicator& of, const std::string& name, const char* what) {
    const auto& any = *of.group->any;
    text_ += name + " " + what + "\n  Group '" + printable(any.name) + "' (" +
             printable(any.backend) + "), " + std::to_string(of.size) + " ranks\n";
  }

  void writeErrors(const Communicator& of, const std::string& name) {
    if ((of.wrong & kIncomplete) != 0) {
      head(of, name, "INCOMPLETE");
      std::vector<MissingRank> silent;
      std::ranges::copy_if(of.missing, std::back_inserter(silent), &MissingRank::unresponsive);
      writeList(silent, [](const auto& each) {
        return describe(each.rank, each.pid, each.host) + ": " + printable(each.why);
      });
      text_ += '\n';
    }
    if ((of.wrong & kError) != 0) {
      head(of, name, "ERROR");
      std::vector<std::pair<int, const Job::Member*>> failed;
      for (const auto& [rank, member] : of.group->members) {
        if (!member.told->failure.empty()) {
          failed.emplace_back(rank, &member);
        }
      }
      writeList(failed, [](const auto& each) {
        const auto& member = *each.second;
        const auto& why = member.told->failure;
        return describe(each.first, member.process->pid, printable(member.process->host)) + ": " +
               printable(why.substr(0, why.find('\n')));
      });
      text_ += '\n';
    }
  }

  void writeTimeouts() {
    const auto unreached = job_.unreached();
    if (!unreached.empty()) {
      text_ += "TIMEOUT\n";
      writeList(unreached, [](const auto& each) {
        return nameOfHost(each.host) + ": " + printable(each.why);
      });
      text_ += '\n';
    }
  }

  std::string joined(std::vector<int> ranks) const {
    const auto all = ranks.size();
    ranks.resize(verbose_ ? all : std::min(all, kMostListed));
    return namedRanks(ranks) +
           (ranks.size() == all ? "" : ", ... (" + std::to_string(all) + " in all)");
  }

  void writeWarnings(const Communicator& of, const std::string& name) {
    if ((of.wrong & kMismatch) != 0) {
      head(of, name, "MISMATCH");
      std::map<unsigned, std::vector<int>> states;
      for (const auto& [rank, member] : of.group->members) {
        states[stateOf(*member.told)].push_back(rank);
      }
      for (const auto& each : of.missing) {
        if (!each.unresponsive) {
          states[kNoComm].push_back(each.rank);
        }
      }
      for (const auto& [state, ranks] : states) {
        if (states.size() > 1) {
          text_ += std::string("  ") + nameOf(state) + ": " + joined(ranks) + "\n";
        }
      }
      for (size_t kind = 0; kind < std::size(kLaunchKinds); ++kind) {
        std::map<uint64_t, std::vector<int>> counts;
        for (const auto& [rank, member] : of.group->members) {
          counts[countOf(*member.told, kind)].push_back(rank);
        }
        for (const auto& [count, ranks] : counts) {
          if (counts.size() > 1) {
            text_ += std::string("  ") + kLaunchKinds[kind] + " " + std::to_string(count) + ": " +
                     joined(ranks) + "\n";
          }
        }
      }
      text_ += '\n';
    }
    if (of.group->waits) {
      head(of, name, "WAITS");
      const auto& verdict = of.group->waits->verdict.text;
      const auto shown = printable(verbose_ ? verdict : verdict.substr(0, verdict.find('\n')));
      for (size_t begin = 0; begin < shown.size();) {
        const auto end = std::min(shown.find('\n', begin), shown.size());
        text_ += "  " + shown.substr(begin, end - begin) + "\n";
        begin = end + 1;
      }
      text_ += '\n';
    }
  }

  const Job& job_;
  const bool verbose_;
  const std::vector<Communicator> communicators_;
  size_t rows_ = 0;
  std::string text_;
};

void writeRank(Json& json, int rank, int64_t global, const std::string& host, int64_t pid) {
  json.field("rank", rank);
  json.field("host", host);
  json.field("pid", pid);
  json.field("cuda_dev", kUnknown);
  json.field("nvml_dev", kUnknown);
  json.field("global_rank", global);
}

void writeMember(Json& json, int rank, const Job::Member& member) {
  const auto& told = *member.told;
  const bool failed = !told.failure.empty();
  writeRank(json, rank, told.ranks[rank], printable(member.process->host), member.process->pid);
  json.objectField("status", [&] {
    json.field("init_state", 0);
    json.field("async_error", failed ? kFailed : 0);
    json.field("finalize_called", false);
    json.field("destroy_flag", false);
    json.field("abort_flag", failed);
  });
  json.objectField("collective_counts", [&] {
    for (size_t kind = 0; kind < std::size(kLaunchKinds); ++kind) {
      json.field(kLaunchKinds[kind], countOf(told, kind));
    }
  });
}

void writeCommunicator(Json& json, const Communicator& of) {
  const auto& any = *of.group->any;
  json.field("hash", hex("0x%llx", of.group->id));
  json.field("secondary_hash", of.id());
  json.field("size", of.size);
  json.field("ranks_count", of.group->members.size());
  json.field("missing_ranks_count", of.missing.size());
  json.field("name", printable(any.name));
  json.field("backend", printable(any.backend));
  if (of.group->waits) {
    json.field("verdict", printable(of.group->waits->verdict.text));
  } else {
    json.field("verdict", nullptr);
  }
  json.listField("ranks", [&] {
    for (const auto& [rank, member] : of.group->members) {
      json.objectElement([&, rank = rank, &member = member] { writeMember(json, rank, member); });
    }
  });
  json.listField("missing_ranks", [&] {
    for (const auto& each : of.missing) {
      json.objectElement([&] {
        writeRank(json, each.rank, any.ranks[each.rank], each.host, each.pid);
        json.objectField("status", [&] {
          json.field("unresponsive", each.unresponsive);
          json.field("considered_dead", each.dead);
        });
        json.field("why", printable(each.why));
      });
    }
  });
}

}  // namespace

std::string rasText(const Job& job, bool verbose) {
  return Text(job, verbose).write();
}

std::string rasJson(const Job& job) {
  const auto communicators = communicatorsOf(job);
  Json json;
  json.object([&] {
    json.field("nccl_version", versionOf(job));
    json.field("cuda_runtime_version", kUnknown);
    json.field("cuda_driver_version", kUnknown);
    json.field("timestamp", rasTime());
    json.field("communicators_count", communicators.size());
    json.listField("communicators", [&] {
      for (const auto& each : communicators) {
        json.objectElement([&] { writeCommunicator(json, each); });
      }
    });
    json.objectField("ras", [&] {
      json.field("collection_time_sec", static_cast<double>(job.question().tookMs) / 1000);
      json.field("timeouts_count", timeoutsOf(job));
    });
  });
  return json.take() + "\n";
}

std::string rasTime() {
  const auto now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%F %T", &parts);
  return text;
}

}  // namespace torchcomms_pg::status
