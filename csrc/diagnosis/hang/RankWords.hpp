// What each rank of a group has written of itself on the board. Independent of torch.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "diagnosis/hang/SharedBoard.hpp"

namespace torchcomms_pg {

// Reads the words of ranks that have not answered in a diagnosis. One connection serves all
// questions, and a known word is not asked for again. The step of the diagnosis that asks has a
// time limit: so no question of a verdict begins after the verdict's questions have waited for
// kLimit. Used by one thread.
class RankWords {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kLimit{1000};
  // Questions that are this far apart belong to different verdicts.
  static constexpr std::chrono::milliseconds kBetweenVerdicts{2000};

  // `now`: the clock.
  explicit RankWords(
      std::unique_ptr<SharedBoard> board, std::function<Clock::time_point()> now = &Clock::now)
      : board_(std::move(board)), now_(std::move(now)) {}

  void write(int rank, const std::string& word) { board_->set(keyOf(rank), word); }

  // Returns the word of a rank, "" if it has written none, or nullopt if this verdict's time is
  // over. Raises the board's errors.
  std::optional<std::string> of(int rank) {
    const auto begun = now_();
    if (begun - latest_ > kBetweenVerdicts) {
      spent_ = {};
    }
    latest_ = begun;
    if (const auto known = known_.find(rank); known != known_.end()) {
      return known->second;
    }
    if (spent_ >= kLimit) {
      return std::nullopt;
    }
    auto word = board_->get(keyOf(rank)).value_or("");
    latest_ = now_();
    spent_ += latest_ - begun;
    if (!word.empty()) {
      known_.emplace(rank, word);
    }
    return word;
  }

 private:
  static std::string keyOf(int rank) { return "who/" + std::to_string(rank); }

  const std::unique_ptr<SharedBoard> board_;
  const std::function<Clock::time_point()> now_;
  std::map<int, std::string> known_;
  Clock::time_point latest_{};  // time of the latest question
  Clock::duration spent_{};     // time for which questions of this verdict have waited
};

}  // namespace torchcomms_pg
