#include "judge/JobReport.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <ranges>

#include "diagnosis/status/Json.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg::status {

namespace {

double seconds(int64_t milliseconds) {
  return static_cast<double>(milliseconds) / 1000;
}

// Returns nullopt for a negative number, which stands for none.
std::optional<double> secondsIfAny(int64_t milliseconds) {
  return milliseconds < 0 ? std::nullopt : std::optional(seconds(milliseconds));
}

std::vector<std::string> linesOf(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    lines.push_back(printable(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return lines;
}

class Report {
 public:
  explicit Report(const Job& job) : job_(job) {}

  std::string write() const {
    const auto& question = job_.question();
    const auto& asked = job_.asked();
    Json json;
    json.object([&] {
      json.field("version", 1);
      json.field("torchcomms_pg", printable(asked.version));
      json.objectField("asked", [&] {
        json.field("pid", question.pid);
        json.field("host", nameOfHost(question.host));
      });
      json.field("store", printable(asked.store));
      json.field("run_id", printable(asked.run));
      json.field("healthy", job_.healthy());
      json.field("late_after_s", seconds(question.lateMs));
      json.field("took_s", seconds(question.tookMs));
      json.listField("unreached_hosts", job_.unreached(), [&](const auto& each) {
        json.field("host", nameOfHost(each.host));
        json.field("why", printable(each.why));
      });
      json.listField("groups", job_.groups(), [&](const auto* group) { writeGroup(json, *group); });
      json.listField("waits", job_.otherWaits(), [&](const auto& wait) {
        json.field("operation", printable(wait.text));
        json.field("since_s", seconds(wait.ageMs));
        json.field("there", wait.there);
        json.field("waits_for", wait.waitsFor);
        json.field("verdict", wait.verdict);
      });
      json.listField("ranks", [&] { writeRanks(json); });
    });
    return json.take();
  }

 private:
  static std::vector<int64_t> global(const Job::Group& group, const std::vector<int>& ranks) {
    std::vector<int64_t> numbers;
    for (const int rank : ranks) {
      numbers.push_back(group.any->ranks[rank]);
    }
    return numbers;
  }

  void writeGroup(Json& json, const Job::Group& group) const {
    // Writes text, since an id may exceed the integers that JSON readers represent exactly.
    json.field("id", std::to_string(group.id));
    json.field("name", printable(group.any->name));
    json.field("description", printable(group.any->description));
    json.field("backend", printable(group.any->backend));
    json.field("ranks", group.any->ranks);
    auto least = std::numeric_limits<uint64_t>::max();
    uint64_t most = 0;
    for (const auto& [rank, member] : group.members) {
      least = std::min(least, member.told->collectives);
      most = std::max(most, member.told->collectives);
    }
    // Ranks report at different times, so their numbers may differ in a healthy job, too.
    json.objectField("completed_collectives", [&] {
      json.field("least", least);
      json.field("most", most);
    });
    writeLateness(json, group);
    writeMissing(json, group);
    if (!group.waits) {
      json.field("waits", nullptr);
      return;
    }
    const auto& finding = *group.waits;
    json.objectField("waits", [&] {
      json.field("rank", group.any->ranks[finding.rank]);
      json.field("operation", printable(finding.op->text));
      json.field("since_s", seconds(finding.op->ageMs));
      json.field("waits_for", global(group, finding.verdict.missing));
      json.field("behind", global(group, finding.verdict.ranks));
      json.field("prolonged", finding.verdict.extensionMs > 0);
      const auto& parting = finding.verdict.parting;
      json.fieldOfJson("parted_at", parting.empty() ? "[]" : parting.substr(0, parting.find('\n')));
      json.field("verdict", printable(finding.verdict.text));
    });
  }

  // Writes the members that have not answered for the group.
  void writeMissing(Json& json, const Job::Group& group) const {
    const auto& ranks = group.any->ranks;
    const auto isMissing = [&](int rank) { return !group.members.contains(rank); };
    const auto all = std::views::iota(0, static_cast<int>(ranks.size()));
    json.listField("missing", all | std::views::filter(isMissing), [&](int rank) {
      json.field("rank", rank);
      if (const auto* const quiet = job_.quietOf(group.id, ranks[rank])) {
        json.field("state", quiet->process->state);
        json.field("host", nameOfHost(quiet->host->host));
        json.field("pid", quiet->process->pid);
      } else if (const auto* const other = job_.elsewhere(ranks[rank])) {
        json.field("state", "elsewhere");
        json.field("host", printable(other->process->host));
        json.field("pid", other->process->pid);
      } else {
        json.field("state", "unknown");
      }
      json.field("text", printable(job_.silentOf(group.id, ranks[rank]).text));
    });
  }

  static void writeLateness(Json& json, const Job::Group& group) {
    const auto& ranks = group.any->ranks;
    const auto judge = std::ranges::find_if(group.members, [&](const auto& member) {
      return member.second.told->lateness.ranks.size() == ranks.size();
    });
    if (judge == group.members.end()) {
      json.field("lateness", nullptr);
      return;
    }
    const auto& lateness = judge->second.told->lateness;
    json.objectField("lateness", [&] {
      const auto late = lateness.late;
      const bool known = late && *late >= 0 && *late < std::ssize(ranks);
      json.field("late", known ? std::optional(ranks[*late]) : std::nullopt);
      json.field("collectives", lateness.collectives);
      json.field("took_s", lateness.seconds);
      json.listField("ranks", std::views::iota(size_t{0}, ranks.size()), [&](size_t rank) {
        json.field("rank", ranks[rank]);
        json.field("later_s", lateness.ranks[rank].later);
        json.field("share", lateness.ranks[rank].share);
      });
    });
  }

  void writeRanks(Json& json) const {
    auto sorted = job_.ranks();
    std::ranges::stable_sort(sorted, [](const auto& one, const auto& other) {
      return one.activity->rank < other.activity->rank;
    });
    json.objects(sorted, [&](const auto& rank) { writeRank(json, rank); });
    json.objects(job_.quiet(), [&](const auto& quiet) {
      const auto& silent = *quiet.process;
      json.field("rank", std::ranges::min(silent.memberships, {}, &Membership::rank).rank);
      json.field("pid", silent.pid);
      json.field("host", nameOfHost(quiet.host->host));
      json.field("state", silent.state);
      json.field("text", printable(silent.text));
    });
    json.objects(job_.missing(), [&](int64_t rank) {
      json.field("rank", rank);
      json.field("state", "unknown");
      json.field("text", job_.silentOf(0, rank).text);
    });
  }

  void writeRank(Json& json, const Job::Member& rank) const {
    const auto& process = *rank.process;
    json.field("rank", rank.activity->rank);
    json.field("pid", process.pid);
    json.field("host", printable(process.host));
    json.field("state", "answers");
    json.field("compiling_s", secondsIfAny(process.compilingMs));
    json.objectField("python", [&] {
      json.field("silent_s", secondsIfAny(process.pythonSilentMs));
      json.field("threads", linesOf(process.threads));
    });
    const auto isUsed = [&](const auto& group) { return !job_.isUnused(group.id); };
    json.listField(
        "groups", rank.activity->groups | std::views::filter(isUsed),
        [&](const auto& group) { writeMember(json, group); });
  }

  static void writeMember(Json& json, const MemberStatus& group) {
    json.field("id", std::to_string(group.id));
    json.field("name", printable(group.name));
    json.field("rank", group.rank);
    json.field("completed_collectives", group.collectives);
    json.objectField("issued", [&] {
      for (size_t kind = 0; kind < std::size(kLaunchKinds); ++kind) {
        json.field(kLaunchKinds[kind], kind < group.launched.size() ? group.launched[kind] : 0);
      }
    });
    json.field("last_completed", printable(group.lastCompleted.text));
    json.field("failure", printable(group.failure));
    json.field("in_flight", group.inFlight);
    json.listField("oldest", group.ops, [&](const auto& op) {
      json.field("operation", printable(op.text));
      json.field("since_s", seconds(op.ageMs));
      json.field("awaited", op.waits && !op.wait.indirect);
      json.field("called_at", printable(op.calledAt));
    });
  }

  const Job& job_;
};

}  // namespace

std::string report(const JobAnswers& answers) {
  return Report(Job(answers)).write();
}

}  // namespace torchcomms_pg::status
