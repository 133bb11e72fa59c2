#include "monitor/Verdict.hpp"

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <sstream>
#include <utility>

#include "monitor/Printable.hpp"

namespace torchcomms_pg {

namespace {

using std::quoted;

// Returns whether all has been read, and nothing else is there.
bool ended(std::istream& in) {
  return in && in.peek() == std::istream::traits_type::eof();
}

std::string seconds(int64_t milliseconds) {
  if (milliseconds < 100) {
    return std::to_string(milliseconds) + " ms";
  }
  std::ostringstream out;
  out << static_cast<double>(milliseconds / 100) / 10 << " s";
  return out.str();
}

// Returns the part of a collective's description that must be the same on all ranks: its name, and
// what follows the sizes, which may differ. Empty: no collective.
std::string kindOf(const std::string& op) {
  const auto name = op.substr(0, op.find(" #"));
  for (const char* other : {"send", "recv", "put", "signal", "wait_signal", "coalesced"}) {
    if (name == other) {
      return "";
    }
  }
  const auto sizes = op.find(" x ");
  return sizes == std::string::npos ? name : name + op.substr(sizes);
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

std::string indented(const std::string& lines) {
  std::string text;
  std::istringstream in(lines);
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
      const std::map<int, std::string>& silent)
      : request_(request), answers_(answers), silent_(silent) {}

  Verdict judge() {
    Verdict verdict;
    verdict.answered = static_cast<int>(answers_.size());
    disagree_ = !request_.disagreement.empty() || !others().empty();
    verdict.disagree = disagree_;
    if (!disagree_) {
      verdict.ranks = missing();
      if (const auto [more, why] = extension(verdict.ranks); more > 0) {
        verdict.extensionMs = more;
        verdict.text = why;
        return verdict;
      }
    } else {
      verdict.ranks = request_.disagreement.empty() ? others() : request_.absent;
    }
    std::copy_if(
        verdict.ranks.begin(),
        verdict.ranks.end(),
        std::back_inserter(verdict.silent),
        [this](int rank) { return !contains(request_.absent, rank) && answers_.count(rank) == 0; });
    verdict.text = printable(headline(verdict) + cycles(verdict.ranks) + details(verdict.ranks));
    return verdict;
  }

 private:
  // Returns the ranks in another operation with the same number: than the one asked about, or than
  // each other, if the asking rank is further than they are.
  std::vector<int> others() const {
    std::vector<int> ranks;
    if (request_.pointToPoint) {
      return ranks;
    }
    std::map<uint64_t, std::map<std::string, std::vector<int>>> called;  // by number, by kind
    for (const auto& [rank, answer] : answers_) {
      if (const auto kind = kindOf(answer.current); !kind.empty()) {
        called[answer.currentSeq][kind].push_back(rank);
      }
    }
    const auto asked = kindOf(request_.op);
    for (const auto& [number, kinds] : called) {
      for (const auto& [kind, who] : kinds) {
        if (number == request_.seq && !asked.empty() ? kind != asked : kinds.size() > 1) {
          ranks.insert(ranks.end(), who.begin(), who.end());
        }
      }
    }
    return ranks;
  }

  // Returns the ranks that have not come. A rank's own word counts more than the library's, which
  // may know only the ranks it waits for first.
  std::vector<int> missing() const {
    if (request_.pointToPoint && request_.peer >= 0) {
      return {request_.peer};
    }
    std::vector<int> ranks;
    for (int rank = 0; rank < request_.size; ++rank) {
      const auto found = answers_.find(rank);
      const bool silent = found == answers_.end();
      if (silent || (!request_.pointToPoint && found->second.issued < request_.seq)) {
        ranks.push_back(rank);
      }
    }
    return ranks.empty() ? request_.absent : ranks;
  }

  // Returns the extension and its reason. A rank that compiles, or has just ended, gets the length
  // of a timeout from then on, within the limit; one that has asked for time, until it is over.
  std::pair<int64_t, std::string> extension(const std::vector<int>& missing) const {
    int64_t more = 0;
    std::string why;
    for (const int rank : missing) {
      const auto found = answers_.find(rank);
      if (found == answers_.end()) {
        return {0, ""};  // no sign that the rank will come
      }
      const auto& answer = found->second;
      // Grants not all of it at once: the rank may be done sooner, and then be lost.
      int64_t wanted = std::min(answer.relaxedMs, std::max<int64_t>(request_.timeoutMs, 1000));
      std::string reason = "has asked its peers to wait";
      int64_t compile = 0;
      if (answer.compilingMs >= 0) {
        compile = request_.timeoutMs;
        reason = wanted > 0 ? reason : "has been compiling for " + seconds(answer.compilingMs);
      } else if (answer.compiledMs >= 0 && answer.compiledMs < request_.timeoutMs) {
        compile = request_.timeoutMs - answer.compiledMs;
        reason = wanted > 0 ? reason : "has just compiled";
      }
      wanted = std::max(wanted, std::min(compile, request_.compileLeftMs));
      if (wanted <= 0) {
        return {0, ""};
      }
      more = more == 0 ? wanted : std::min(more, wanted);
      why += (why.empty() ? "" : ", ") + named({rank}) + " " + reason;
    }
    return {more, why};
  }

  std::string named(const std::vector<int>& ranks) const {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    std::string numbers;
    bool same = true;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const auto number = global(ranks[i]);
      text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
      numbers += (i == 0 ? "" : ", ") + std::to_string(number);
      same = same && number == ranks[i];
    }
    return same ? text : text + " (global " + numbers + ")";
  }

  std::string headline(const Verdict& verdict) const {
    const auto group =
        "group '" + request_.group + "', " + std::to_string(request_.size) + " ranks: ";
    if (disagree_) {
      return "verdict on " + group + "its ranks call different operations";
    }
    const auto what = request_.op + ", issued " + seconds(request_.waitedMs) + " ago";
    if (verdict.ranks.empty()) {
      return "verdict on " + group +
             (request_.queued
                  ? "all ranks have queued " + what +
                        ", and it has not finished, nor perhaps what is queued before it"
                  : "all ranks have arrived at " + what + ", and it has not finished");
    }
    const auto& silent = verdict.silent;
    if (silent.size() == verdict.ranks.size()) {
      return "verdict on " + group + named(silent) +
             " did not answer, so that nobody knows whether " +
             (silent.size() == 1 ? "it has " : "they have ") +
             (request_.queued ? "queued " : "arrived at ") + what;
    }
    std::vector<int> late;
    for (const int rank : verdict.ranks) {
      if (!contains(silent, rank)) {
        late.push_back(rank);
      }
    }
    return "verdict on " + group + named(late) + (late.size() == 1 ? " has" : " have") +
           " not arrived at " + what +
           (silent.empty() ? "" : "; " + named(silent) + " did not answer");
  }

  std::string details(const std::vector<int>& guilty) const {
    std::string text;
    for (const int rank : guilty) {
      text += "\n  " + named({rank}) + ": " + about(rank, /*missing=*/!disagree_);
    }
    // Groups the other ranks by the place at which they wait.
    std::map<std::string, std::vector<int>> places;
    for (int rank = 0; rank < request_.size; ++rank) {
      if (!contains(guilty, rank)) {
        places[about(rank, false)].push_back(rank);
      }
    }
    for (const auto& [place, ranks] : places) {
      text += "\n  " + named(ranks) + ": " + place;
    }
    return text;
  }

  // Names the ranks that wait in another group for a rank that waits here: neither can go on.
  std::string cycles(const std::vector<int>& guilty) const {
    std::string text;
    for (const int rank : guilty) {
      const auto found = answers_.find(rank);
      std::vector<int> waiting;
      for (const auto& [other, answer] : answers_) {
        if (found != answers_.end() && waitsHere(answer) && found->second.waitsFor(global(other))) {
          waiting.push_back(other);
        }
      }
      if (!waiting.empty()) {
        text += "\n  deadlock: " + named({rank}) + " waits in " + found->second.elsewhere +
                " for " + named(waiting) + ", which " + (waiting.size() == 1 ? "waits" : "wait") +
                " here; all ranks have to call the operations of several groups in one order";
      }
    }
    return text;
  }

  bool waitsHere(const RankStatus& answer) const {
    return !answer.current.empty() && answer.issued >= request_.seq;
  }

  int64_t global(int rank) const {
    const auto& all = request_.globalRanks;
    return static_cast<size_t>(rank) < all.size() ? all[rank] : rank;
  }

  std::string about(int rank, bool missing) const {
    const auto found = answers_.find(rank);
    if (found == answers_.end()) {
      const auto known = silent_.find(rank);
      return known == silent_.end() ? std::string("did not answer") : known->second;
    }
    const auto& answer = found->second;
    std::string text;
    if (!answer.failure.empty()) {
      text = "gave the group up: " + answer.failure;
    } else if (!answer.current.empty()) {
      text = "in " + answer.current;
      text += missing ? " since " + seconds(answer.waitedMs) : "";
    } else if (answer.completed.empty()) {
      text = answer.issued == 0 ? "called nothing in this group yet"
                                : "completed nothing in this group yet";
    } else {
      text = "last completed " + answer.completed + " in this group";
    }
    if (missing && !answer.elsewhere.empty()) {
      text += "; it waits in " + answer.elsewhere;
    }
    if (answer.compilingMs >= 0) {
      text += "; it has been compiling for " + seconds(answer.compilingMs);
    }
    if (!answer.calledAt.empty() && !answer.current.empty()) {
      text += ", called at " + answer.calledAt;
      if (!missing) {
        return text;  // the rank still is there
      }
    }
    return text + indented(answer.threads);
  }

  const DiagnosisRequest& request_;
  const std::map<int, RankStatus>& answers_;
  const std::map<int, std::string>& silent_;
  bool disagree_ = false;
};

}  // namespace

Verdict judge(
    const DiagnosisRequest& request,
    const std::map<int, RankStatus>& answers,
    const std::map<int, std::string>& silent) {
  return Report(request, answers, silent).judge();
}

// Fields one after another, texts in quotes. A text comes last, so that a part of them is noticed.
std::string encode(const RankStatus& a) {
  std::ostringstream out;
  out << a.rank << ' ' << a.issued << ' ' << quoted(a.current) << ' ' << a.currentSeq << ' '
      << a.waitedMs << ' ' << quoted(a.calledAt) << ' ' << quoted(a.completed) << ' '
      << quoted(a.failure) << ' ' << quoted(a.threads) << ' ' << a.compilingMs << ' '
      << a.compiledMs << ' ' << a.relaxedMs << ' ' << a.elsewhereFor.size() << ' ';
  for (const auto rank : a.elsewhereFor) {
    out << rank << ' ';
  }
  out << quoted(a.elsewhere);
  return out.str();
}

std::optional<RankStatus> decodeStatus(const std::string& text) {
  std::istringstream in(text);
  RankStatus a;
  size_t ranks = 0;
  in >> a.rank >> a.issued >> quoted(a.current) >> a.currentSeq >> a.waitedMs >>
      quoted(a.calledAt) >> quoted(a.completed) >> quoted(a.failure) >> quoted(a.threads) >>
      a.compilingMs >> a.compiledMs >> a.relaxedMs >> ranks;
  for (; in && ranks > 0; --ranks) {
    in >> a.elsewhereFor.emplace_back();
  }
  in >> quoted(a.elsewhere);
  return ended(in) ? std::optional(std::move(a)) : std::nullopt;
}

std::string encode(const Verdict& verdict) {
  std::ostringstream out;
  out << verdict.extensionMs << ' ' << verdict.answered << ' ' << verdict.disagree << ' '
      << verdict.ranks.size() << ' ';
  for (const int rank : verdict.ranks) {
    out << rank << ' ' << contains(verdict.silent, rank) << ' ';
  }
  out << quoted(verdict.text);
  return out.str();
}

std::optional<Verdict> decodeVerdict(const std::string& text) {
  std::istringstream in(text);
  Verdict verdict;
  size_t ranks = 0;
  in >> verdict.extensionMs >> verdict.answered >> verdict.disagree >> ranks;
  for (; in && ranks > 0; --ranks) {
    bool silent = false;
    in >> verdict.ranks.emplace_back() >> silent;
    if (silent) {
      verdict.silent.push_back(verdict.ranks.back());
    }
  }
  in >> quoted(verdict.text);
  return ended(in) ? std::optional(std::move(verdict)) : std::nullopt;
}

}  // namespace torchcomms_pg
