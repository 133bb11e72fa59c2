#include "diagnosis/store/LeftWords.hpp"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <utility>

#include "diagnosis/hang/RunningTime.hpp"
#include "diagnosis/store/StoreBoard.hpp"
#include "monitor/Apart.hpp"

namespace torchcomms_pg::left_words {

namespace {

constexpr const char* kLeftCount = "left";  // number of ranks that have left word
constexpr const char* kFirstLeft = "left/first";
constexpr Milliseconds kLeaving{300};
constexpr Milliseconds kTelling{500};

std::string keyOf(int rank) {
  return "left/" + std::to_string(rank);
}

// Returns a word for people: without the time, which the store has in front of each word. Returns
// "" if no time is in front.
std::string textOf(int rank, const std::string& word, const Group& group) {
  const auto space = word.find(' ');
  return space == std::string::npos ? "" : "; rank " + group.numberOf(rank) + word.substr(space);
}

// Runs `body` in another thread, since the store may block. Returns its result, or "" if that takes
// longer than `patience`. Raises an error if the store has ended with the rank that served it.
std::string within(Milliseconds patience, std::function<std::string()> body) {
  auto result = apart(std::move(body));
  return waitRunning(result, patience) ? result.get() : "";
}

}  // namespace

void leave(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& how,
    const InFlightOps& inFlight) noexcept try {
  within(
      kLeaving, [store, rank, size, how, last = inFlight.inspect([](const auto&, const auto& op) {
        return op.seq == 0 ? std::string() : ", after " + describe(op);
      })] {
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        StoreBoard board(store);
        board.set(
            keyOf(rank), std::to_string(std::chrono::duration_cast<Milliseconds>(now).count()) +
                             " " + how + last);
        board.claim(kFirstLeft, std::to_string(rank));
        if (board.add(kLeftCount, 1) == size) {  // no rank is left that could ask
          for (int each = 0; each < size; ++each) {
            board.erase(keyOf(each));
          }
          board.erase(kFirstLeft);
          board.erase(kLeftCount);
        }
        return "";
      });
} catch (const std::exception&) {
  // No thread can be started, or the store has ended.
}

std::optional<Word> first(const c10::intrusive_ptr<c10d::Store>& store, const Group& group) {
  StoreBoard board(store);
  const auto left = board.get(kFirstLeft);
  if (!left) {
    return std::nullopt;
  }
  const int rank = std::atoi(left->c_str());
  auto text = textOf(rank, board.get(keyOf(rank)).value_or(""), group);
  return text.empty() ? std::nullopt : std::optional(Word{rank, std::move(text)});
}

bool has(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  return StoreBoard(store).get(keyOf(rank)).has_value();
}

std::string tell(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const Group& group) noexcept try {
  return within(kTelling, [store, ranks, group] {
    StoreBoard board(store);
    std::multimap<long long, std::string> words;  // by time
    for (const int rank : ranks) {
      const auto word = board.get(keyOf(rank)).value_or("");
      if (auto text = textOf(rank, word, group); !text.empty()) {
        words.emplace(std::atoll(word.c_str()), std::move(text));
      }
    }
    std::string text;
    for (const auto& [time, word] : words) {
      text += word;
    }
    return text;
  });
} catch (const std::exception&) {
  return "";  // no thread can be started, or the store has ended
}

}  // namespace torchcomms_pg::left_words
