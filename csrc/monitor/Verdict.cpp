#include "monitor/Verdict.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "base/TextStreams.hpp"
#include "monitor/Fields.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg {

namespace {

std::string seconds(int64_t milliseconds) {
  if (milliseconds < 100) {
    return std::to_string(milliseconds) + " ms";
  }
  TextWriter out;
  out << static_cast<double>(milliseconds / 100) / 10 << " s";
  return out.str();
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::string indented(const std::string& lines) {
  std::string text;
  TextReader in(lines);
  for (std::string line; std::getline(in, line);) {
    text += "\n      " + line;
  }
  return text;
}

class Report {
 public:
  Report(
      const DiagnosisRequest& request,
      const std::map<int, RankStatus>& answers,
      const std::map<int, Silent>& silent)
      : request_(request),
        answers_(answers),
        silent_(silent),
        blame_(blame(request, answers, silent)),
        late_(blame_.lateRanks()),
        disagree_(!request.disagreement.empty() || !blame_.disagree.empty()) {}

  Verdict judge() {
    Verdict verdict;
    verdict.answered = static_cast<int>(answers_.size());
    verdict.about = request_.wait;
    verdict.missing = blame_.missing;
    if (disagree_) {
      verdict.ranks = request_.disagreement.empty() ? blame_.disagree : request_.absent;
    } else {
      if (const auto [more, why] = extension(); more > 0) {
        verdict.extensionMs = more;
        verdict.text = why;
        return verdict;
      }
      verdict.ranks = atFault();
      verdict.arrived = verdict.ranks.empty() && blame_.circle.empty() && blame_.missing.empty();
    }
    verdict.summary = printable(summary());
    verdict.text = printable(
        "verdict on group '" + request_.group + "', " + std::to_string(request_.size) +
        " ranks: " + headline() + deadlock() + details(verdict.ranks));
    return verdict;
  }

 private:
  // Returns the ranks that are proven to be at fault. If no rank is, and no circle explains the
  // wait, returns the ranks without an answer that may be needed.
  std::vector<int> atFault() const {
    auto ranks = late_;
    ranks.insert(ranks.end(), blame_.gone.begin(), blame_.gone.end());
    std::sort(ranks.begin(), ranks.end());
    return ranks.empty() && blame_.circle.empty() ? blame_.silent : ranks;
  }

  std::vector<int> unanswered() const {
    auto ranks = blame_.gone;
    ranks.insert(ranks.end(), blame_.silent.begin(), blame_.silent.end());
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  // Returns how much longer the ranks wait, in ms, and why; 0 for no longer. Every late rank must
  // be granted time. If all ranks have arrived, any rank's grant counts: that rank may have arrived
  // only now, and the operation still gets the time that was promised.
  std::pair<int64_t, std::string> extension() const {
    if (request_.ended) {
      return {std::max<int64_t>(request_.timeoutMs, 1000), "the operation has ended meanwhile"};
    }
    if (!unanswered().empty() || !blame_.circle.empty()) {
      return {0, ""};  // no sign that these ranks will arrive
    }
    if (late_.empty() && blame_.missing.empty()) {
      if (request_.mayHaveEnded) {
        return {std::max<int64_t>(request_.timeoutMs, 1000), "all ranks have arrived at it"};
      }
      for (const auto& [rank, answer] : answers_) {
        if (const auto [more, reason] = grant(answer); more > 0) {
          return {more, named({rank}) + " " + reason};
        }
      }
    }
    int64_t least = 0;
    std::string why;
    for (const int rank : late_) {
      const auto found = answers_.find(rank);
      const auto [more, reason] =
          found == answers_.end() ? std::pair(int64_t{0}, std::string()) : grant(found->second);
      if (more <= 0) {
        return {0, ""};
      }
      least = least == 0 ? more : std::min(least, more);
      why += (why.empty() ? "" : ", ") + named({rank}) + " " + reason;
    }
    return {least, why};
  }

  // Returns how long others wait for the rank, in ms, and why. A rank that compiles gets one more
  // timeout, and a rank that has just compiled the rest of a timeout since then, both within the
  // limit. A rank that has asked for time gets the rest of that time.
  std::pair<int64_t, std::string> grant(const RankStatus& answer) const {
    // At most one timeout at a time: the rank may go on sooner, and hang afterwards.
    const auto asked = std::min(answer.relaxedMs, std::max<int64_t>(request_.timeoutMs, 1000));
    int64_t compile = 0;
    std::string reason;
    if (answer.compilingMs >= 0) {
      compile = request_.timeoutMs;
      reason = "has been compiling for " + seconds(answer.compilingMs);
    } else if (answer.compiledMs >= 0 && answer.compiledMs < request_.timeoutMs) {
      compile = request_.timeoutMs - answer.compiledMs;
      reason = "has just compiled";
    }
    return {
        std::max(asked, std::min(compile, request_.compileLeftMs)),
        asked > 0 ? "has asked its peers to wait" : reason};
  }

  // Names ranks by their numbers in the group, and also by their global ranks if these differ.
  std::string named(const std::vector<int>& ranks, bool withHosts = false) const {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    std::string numbers;
    bool same = true;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const auto number = global(ranks[i]);
      text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
      if (withHosts && static_cast<size_t>(ranks[i]) < request_.hosts.size()) {
        text += " on " + request_.hosts[ranks[i]];
      }
      numbers += (i == 0 ? "" : ", ") + std::to_string(number);
      same = same && number == ranks[i];
    }
    return same ? text : text + " (global " + numbers + ")";
  }

  bool isAsked(const Wait& wait) const { return isSameOperation(wait, request_.wait); }

  std::string headline() const {
    if (disagree_) {
      return "its ranks call different operations";
    }
    const auto what = request_.op + ", issued " + seconds(request_.waitedMs) + " ago";
    const std::string arrived = request_.queued ? "queued " : "arrived at ";
    const auto unknown = unanswered();
    std::string text;
    bool asked = false;
    for (const auto& late : blame_.late) {
      text += text.empty() ? "" : "; ";
      text += named(late.ranks) + (late.ranks.size() == 1 ? " has" : " have") + " not arrived at ";
      if (isAsked(late.wait)) {
        text += what;
        asked = true;
      } else {
        text += late.wait.text + ", in which " + named(late.waiting) +
                (late.waiting.size() == 1 ? " waits" : " wait");
      }
    }
    if (!blame_.late.empty()) {
      text += unknown.empty() ? "" : "; " + named(unknown) + " did not answer";
    } else if (!blame_.circle.empty()) {
      text += named(circleRanks()) + " wait for each other";
    } else if (!unknown.empty()) {
      text += named(unknown) + " did not answer, so that nobody knows whether " +
              (unknown.size() == 1 ? "it has " : "they have ");
      const bool direct = std::any_of(
          unknown.begin(), unknown.end(), [&](int rank) { return contains(blame_.missing, rank); });
      text += direct ? arrived + what : "arrived where others wait";
      asked = direct;
    } else if (!blame_.missing.empty()) {
      text += named(blame_.missing) + (blame_.missing.size() == 1 ? " has" : " have") + " not " +
              arrived + what + ", and " +
              (mayGoOn()                    ? "may wait"
               : blame_.missing.size() == 1 ? "waits"
                                            : "wait") +
              " elsewhere";
      asked = true;
    } else {
      return request_.queued ? "all ranks have queued " + what +
                                   ", and it has not finished, nor perhaps what is queued before it"
                             : "all ranks have arrived at " + what + ", and it has not finished";
    }
    if (!asked) {
      text += "; " + what + ", waits for " + named(blame_.missing);
    }
    return text;
  }

  // Returns whether some missing rank may go on, since none of its threads is known to wait.
  bool mayGoOn() const {
    return std::ranges::any_of(blame_.missing, [&](int rank) {
      const auto answer = answers_.find(rank);
      return answer != answers_.end() && std::ranges::all_of(answer->second.waits, &Wait::indirect);
    });
  }

  std::string summary() const {
    if (disagree_) {
      return "the ranks call different operations";
    }
    std::string text;
    for (const auto& late : blame_.late) {
      const bool asked = isAsked(late.wait);
      const bool signal = asked && !late.wait.messages.empty() &&
                          late.wait.messages.front().kind == AwaitedMessage::Kind::signal;
      text += (text.empty() ? "" : ", ") + named(late.ranks, true) +
              (signal ? " sent no signal" : " did not arrive");
      text += asked ? "" : " at " + late.wait.text;
    }
    if (const auto unknown = unanswered(); !unknown.empty()) {
      text += (text.empty() ? "" : ", ") + named(unknown, true) + " did not answer";
    }
    if (!blame_.circle.empty()) {
      text += (text.empty() ? "" : ", ") + named(circleRanks(), true) + " wait for each other";
    }
    if (text.empty() && !blame_.missing.empty()) {
      text = named(blame_.missing, true) + " did not arrive, but " +
             (mayGoOn() ? "may wait elsewhere" : "waits elsewhere");
    }
    return text.empty() && !request_.queued
               ? "all ranks have arrived, and the operation has not finished"
               : text;
  }

  std::vector<int> circleRanks() const {
    std::vector<int> ranks;
    for (const auto& link : blame_.circle) {
      ranks.push_back(link.rank);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  // Describes the ranks that wait for each other.
  std::string deadlock() const {
    const auto& circle = blame_.circle;
    if (disagree_ || circle.empty()) {
      return "";
    }
    std::string text = "\n  deadlock: " + named({circle.front().rank});
    std::set<uint64_t> groups;
    for (size_t i = 0; i < circle.size(); ++i) {
      groups.insert(circle[i].wait.group);
      text += (i == 0 ? " waits in " : ", which waits in ") + circle[i].wait.text + " for " +
              named({circle[(i + 1) % circle.size()].rank});
    }
    if (!blame_.certain) {
      text +=
          "; one of them only by its device's queue or by a future, so that its program may go on";
    }
    return text + (groups.size() > 1 ? "; all ranks have to call the operations of several groups "
                                       "in one order"
                                     : "");
  }

  std::string details(const std::vector<int>& guilty) const {
    std::string text;
    for (const int rank : guilty) {
      text += "\n  " + named({rank}) + ": " + about(rank, /*missing=*/!disagree_);
    }
    // Lists the other ranks, together if they wait at the same place.
    std::map<std::string, std::vector<int>> places;
    for (int rank = 0; rank < request_.size; ++rank) {
      const bool asked = answers_.count(rank) + silent_.count(rank) > 0;
      if (asked && !contains(guilty, rank)) {
        places[about(rank, !disagree_ && contains(blame_.missing, rank))].push_back(rank);
      }
    }
    for (const auto& [place, ranks] : places) {
      text += "\n  " + named(ranks) + ": " + place;
    }
    return text;
  }

  int64_t global(int rank) const {
    const auto& all = request_.globalRanks;
    return static_cast<size_t>(rank) < all.size() ? all[rank] : rank;
  }

  std::string about(int rank, bool missing) const {
    const auto found = answers_.find(rank);
    if (found == answers_.end()) {
      const auto known = silent_.find(rank);
      return known == silent_.end() ? std::string("did not answer") : known->second.text;
    }
    const auto& answer = found->second;
    std::string text;
    if (!answer.failure.empty()) {
      text = "gave the group up: " + answer.failure;
    } else if (!answer.current.empty()) {
      text = "in " + answer.current;
      text += missing ? " since " + seconds(answer.waitedMs) : "";
    } else if (!answer.completed.empty()) {
      text = "last completed " + answer.completed + " in this group";
    } else {
      text = issuedOf(answer) == 0 ? "called nothing in this group yet"
                                   : "completed nothing in this group yet";
    }
    for (const auto& wait : answer.waits) {
      if (missing && wait.group != request_.wait.group) {
        text += "; it waits in " + wait.text;
      }
    }
    if (answer.compilingMs >= 0) {
      text += "; it has been compiling for " + seconds(answer.compilingMs);
    }
    if (!answer.calledAt.empty() && !answer.current.empty()) {
      text += ", called at " + answer.calledAt;
      if (!missing) {
        return text;  // the rank is still at that line
      }
    }
    return text + indented(answer.threads);
  }

  uint64_t issuedOf(const RankStatus& answer) const {
    for (const auto& counts : answer.counts) {
      if (counts.group == request_.wait.group) {
        return counts.collectives;
      }
    }
    return 0;
  }

  const DiagnosisRequest& request_;
  const std::map<int, RankStatus>& answers_;
  const std::map<int, Silent>& silent_;
  const Blame blame_;
  const std::vector<int> late_;
  const bool disagree_;
};

}  // namespace

Verdict judge(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, Silent>& silent) {
  return Report(request, answers, silent).judge();
}

Verdict unknownVerdict(const std::string& why, const DiagnosisRequest& request) {
  Verdict verdict;
  verdict.about = request.wait;
  verdict.text = "verdict: it cannot be known what the other ranks do: " + why;
  return verdict;
}

std::string encode(const Verdict& verdict) {
  return fields::write(verdict);
}

std::optional<Verdict> decodeVerdict(const std::string& text) {
  return fields::read<Verdict>(text);
}

}  // namespace torchcomms_pg
