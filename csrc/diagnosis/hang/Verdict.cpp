#include "diagnosis/hang/Verdict.hpp"

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

#include "base/Text.hpp"
#include "base/TextStreams.hpp"
#include "diagnosis/rank/Fields.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg {

namespace {

// `ranks`: in ascending order.
bool isIn(const std::vector<int>& ranks, int rank) {
  return std::ranges::binary_search(ranks, rank);
}

// Limits of a verdict for any number of ranks: of its lines, of the parts of one list of ranks, and
// of the operations and links of a circle in one sentence.
constexpr size_t kMostLines = 38;
constexpr size_t kLinesOfOthers = 8;  // lines kept for ranks that are not at fault
constexpr size_t kMostParts = 10;
constexpr size_t kMostClauses = 6;

// Lists ranks in words: "0, 2, 5-9", and at most kMostParts parts. `tell` returns the text of a
// rank.
template <class Tell>
std::string listed(const std::vector<int>& ranks, const Tell& tell) {
  std::string text;
  size_t parts = 0;
  for (auto rank = ranks.begin(); rank != ranks.end();) {
    if (++parts > kMostParts) {
      return text + ", ... (" + std::to_string(ranks.size()) + " in all)";
    }
    auto last = rank;
    while (last + 1 != ranks.end() && last[1] == *last + 1) {
      ++last;
    }
    // Three ranks in a row are as short as their range.
    last = last - rank < 3 ? rank : last;
    text += (text.empty() ? "" : ", ") + tell(*rank) + (last == rank ? "" : "-" + tell(*last));
    rank = last + 1;
  }
  return text;
}

// Returns the ranks of both lists, which are in ascending order, in that order.
std::vector<int> merged(const std::vector<int>& one, const std::vector<int>& other) {
  std::vector<int> ranks;
  std::ranges::merge(one, other, std::back_inserter(ranks));
  return ranks;
}

class Report {
 public:
  Report(const DiagnosisRequest& request, const Answers& answers, const SilentRanks& silent)
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
      std::ranges::sort(verdict.ranks);
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
    const auto text = "verdict on group '" + request_.group + "', " +
                      std::to_string(request_.size) + " ranks: " + headline() + deadlock();
    const auto lines = static_cast<size_t>(std::ranges::count(text, '\n')) + 1;
    verdict.text =
        printable(text + details(verdict.ranks, kMostLines - std::min(lines, kMostLines - 1)));
    verdict.printedBy = printable(named({request_.rank}, /*withHosts=*/true));
    return verdict;
  }

  // Names ranks by their numbers in the group, and also by their global ranks if these differ.
  std::string named(const std::vector<int>& ranks, bool withHosts = false) const {
    const auto text =
        (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks, [&](int rank) {
          const bool hasHost = withHosts && static_cast<size_t>(rank) < request_.hosts.size();
          return std::to_string(rank) + (hasHost ? " on " + request_.hosts[rank] : "");
        });
    const bool same =
        std::ranges::all_of(ranks, [&](int rank) { return request_.global(rank) == rank; });
    return same ? text : text + " (global " + listed(ranks, [&](int rank) {
                           return std::to_string(request_.global(rank));
                         }) + ")";
  }

 private:
  // Returns the ranks that are proven to be at fault. If no rank is, and no circle explains the
  // wait, returns the ranks without an answer that may be needed.
  std::vector<int> atFault() const {
    auto ranks = merged(late_, blame_.gone);
    return ranks.empty() && blame_.circle.empty() ? blame_.silent : ranks;
  }

  std::vector<int> unanswered() const { return merged(blame_.gone, blame_.silent); }

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
      reason = "has been compiling for " + aboutSeconds(answer.compilingMs);
    } else if (answer.compiledMs >= 0 && answer.compiledMs < request_.timeoutMs) {
      compile = request_.timeoutMs - answer.compiledMs;
      reason = "has just compiled";
    }
    return {
        std::max(asked, std::min(compile, request_.compileLeftMs)),
        asked > 0 ? "has asked its peers to wait" : reason};
  }

  bool isAsked(const Wait& wait) const { return isSameOperation(wait, request_.wait); }

  std::string headline() const {
    if (disagree_) {
      return "its ranks call different operations";
    }
    const auto what = request_.op + ", issued " + aboutSeconds(request_.waitedMs) + " ago";
    const std::string arrived = request_.queued ? "queued " : "arrived at ";
    const auto unknown = unanswered();
    std::string text;
    bool asked = false;
    for (const auto& late : blame_.late | std::views::take(kMostClauses)) {
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
    if (blame_.late.size() > kMostClauses) {
      text += "; and more ranks have not arrived at other operations";
    }
    if (!blame_.late.empty()) {
      text += unknown.empty() ? "" : "; " + named(unknown) + " did not answer";
    } else if (!blame_.circle.empty()) {
      text += named(circleRanks()) + " wait for each other";
    } else if (!unknown.empty()) {
      text += named(unknown) + " did not answer, so that nobody knows whether " +
              (unknown.size() == 1 ? "it has " : "they have ");
      const bool direct =
          std::ranges::any_of(unknown, [&](int rank) { return isIn(blame_.missing, rank); });
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
    for (const auto& late : blame_.late | std::views::take(kMostClauses)) {
      const bool asked = isAsked(late.wait);
      const bool signal = asked && !late.wait.messages.empty() &&
                          late.wait.messages.front().kind == AwaitedMessage::Kind::signal;
      text += (text.empty() ? "" : ", ") + named(late.ranks, true) +
              (signal ? " sent no signal" : " did not arrive");
      text += asked ? "" : " at " + late.wait.text;
    }
    if (blame_.late.size() > kMostClauses) {
      text += ", and more ranks at other operations";
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
    std::ranges::sort(ranks);
    return ranks;
  }

  // Describes the ranks that wait for each other.
  std::string deadlock() const {
    if (disagree_) {
      return "";
    }
    if (const auto& circle = blame_.circle; !circle.empty()) {
      const bool ofOneGroup = std::ranges::all_of(
          circle, [&](const auto& link) { return link.wait.group == circle.front().wait.group; });
      return "\n  deadlock: " + told(circle, /*threads=*/false) +
             (blame_.certain ? ""
                             : "; one of them only by its device's queue or by a future, so that "
                               "its program may go on") +
             (ofOneGroup
                  ? ""
                  : "; all ranks have to call the operations of several groups in one order");
    }
    return blame_.perhaps.empty() ? ""
                                  : "\n  perhaps a deadlock, if a rank's thread waits for another "
                                    "one of its threads: " +
                                        told(blame_.perhaps, /*threads=*/true);
  }

  // Tells a circle link by link, with the waiting threads if `threads`.
  std::string told(const std::vector<Blame::Link>& circle, bool threads) const {
    const auto nameOf = [&](const Blame::Link& link) {
      return named({link.rank}) +
             (threads && !link.wait.threadName.empty() ? " (" + link.wait.threadName + ")" : "");
    };
    std::string text = nameOf(circle.front());
    for (size_t i = 0; i < circle.size(); ++i) {
      const bool last = i + 1 == circle.size();
      if (i >= kMostClauses && !last) {
        text += i == kMostClauses ? ", and so on, to " + nameOf(circle.back()) : "";
        continue;
      }
      text += (i == 0 ? " waits in " : ", which waits in ") + circle[i].wait.text + " for " +
              nameOf(circle[last ? 0 : i + 1]);
    }
    return text;
  }

  // Tells of each rank, first of those at fault, and of ranks at the same place together. Adds at
  // most `lines` lines.
  std::string details(const std::vector<int>& guilty, size_t lines) const {
    const auto placesOf = [&](bool isGuilty) {
      std::map<std::string, std::vector<int>> known;
      for (int rank = 0; rank < request_.size; ++rank) {
        const bool asked = answers_.count(rank) + silent_.count(rank) > 0;
        const bool missing = isGuilty || isIn(blame_.missing, rank);
        if (isGuilty ? isIn(guilty, rank) : asked && !isIn(guilty, rank)) {
          known[about(rank, !disagree_ && missing)].push_back(rank);
        }
      }
      std::vector<std::pair<std::string, std::vector<int>>> places(known.begin(), known.end());
      if (isGuilty) {
        std::ranges::sort(places, {}, [](const auto& place) { return place.second.front(); });
      }
      return places;
    };
    std::string text;
    size_t left = 0;
    const auto tell = [&](const auto& places, size_t most) {
      for (const auto& [place, ranks] : places) {
        const auto more = "\n  " + named(ranks) + ": " + place;
        const auto count = static_cast<size_t>(std::ranges::count(more, '\n'));
        if (count > most) {
          left += ranks.size();
        } else {
          text += more;
          most -= count;
          lines -= count;
        }
      }
    };
    --lines;  // for what is left out
    tell(placesOf(/*isGuilty=*/true), lines - std::min(lines, kLinesOfOthers));
    tell(placesOf(/*isGuilty=*/false), lines);
    return left == 0 ? text
                     : text + "\n  and " + std::to_string(left) +
                           " more ranks elsewhere, whose latest operations are in their dumps";
  }

  std::string about(int rank, bool missing) const {
    const auto found = answers_.find(rank);
    if (found == answers_.end()) {
      const auto known = silent_.find(rank);
      return known == silent_.end() ? std::string("did not answer") : known->second.text;
    }
    const auto& answer = found->second;
    const auto since = aboutSeconds(answer.waitedMs);
    std::string text;
    if (!answer.failure.empty()) {
      text = "gave the group up: " + answer.failure;
    } else if (!answer.current.empty()) {
      const bool in = answer.stand != Stand::issued;
      text = (in ? "in " : request_.queued ? "queued " : "issued ") + answer.current;
      text += !missing ? "" : in ? " since " + since : " " + since + " ago";
      if (isIn(blame_.passed, rank)) {
        text = "completed " + answer.completed.text + ", " + text;
      }
    } else if (!answer.completed.text.empty()) {
      text = "last completed " + answer.completed.text + " in this group";
    } else {
      const auto issued =
          std::ranges::find(answer.counts, request_.wait.group, &GroupCounts::group);
      text = issued == answer.counts.end() || issued->collectives == 0
                 ? "called nothing in this group yet"
                 : "completed nothing in this group yet";
    }
    for (const auto& wait : answer.waits) {
      const bool elsewhere =
          wait.group != request_.wait.group || (!wait.indirect && answer.stand == Stand::issued);
      if (missing && elsewhere) {
        text +=
            "; it waits in " + wait.text +
            (wait.threadName.empty() || answer.waits.size() == 1 ? ""
                                                                 : " (" + wait.threadName + ")");
      }
    }
    if (answer.compilingMs >= 0) {
      text += "; it has been compiling for " + aboutSeconds(answer.compilingMs);
    }
    if (!answer.calledAt.empty() && !answer.current.empty()) {
      text += ", called at " + answer.calledAt;
      if (!missing && answer.stand == Stand::inCall) {
        return text;  // the rank is still at that line
      }
    }
    return text + indented(answer.threads, "      ");
  }

  const DiagnosisRequest& request_;
  const Answers& answers_;
  const SilentRanks& silent_;
  const Blame blame_;
  const std::vector<int> late_;
  const bool disagree_;
};

}  // namespace

Verdict judge(const DiagnosisRequest& request, const Answers& answers, const SilentRanks& silent) {
  return Report(request, answers, silent).judge();
}

std::string nameRanks(const DiagnosisRequest& request, const std::vector<int>& ranks) {
  return Report(request, {}, {}).named(ranks);
}

std::string indented(const std::string& text, const std::string& blanks) {
  std::string lines;
  TextReader in(text);
  for (std::string line; std::getline(in, line);) {
    lines += "\n" + blanks + line;
  }
  return lines;
}

Verdict unknownVerdict(const std::string& why, const DiagnosisRequest& request) {
  Verdict verdict;
  verdict.about = request.wait;
  verdict.text = "verdict: it cannot be known what the other ranks do: " + why;
  return verdict;
}

std::string printedElsewhere(const Verdict& verdict) {
  const auto end = verdict.text.find('\n');
  return end == std::string::npos
             ? verdict.text
             : verdict.text.substr(0, end) + " (" + verdict.printedBy + " prints the rest)";
}

std::string encode(Verdict verdict) {
  verdict.runs = runsOf(verdict.ranks);
  return fields::write(verdict);
}

std::optional<Verdict> decodeVerdict(const std::string& text) {
  auto verdict = fields::read<Verdict>(text);
  return verdict && spread(verdict->runs, verdict->ranks) ? std::move(verdict) : std::nullopt;
}

}  // namespace torchcomms_pg
