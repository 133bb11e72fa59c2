// Looks for news in the job's store: rings, and other hosts' questions for the status.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "diagnosis/hang/HangDiagnosis.hpp"
#include "diagnosis/hang/SharedBoard.hpp"

namespace torchcomms_pg::status {

// The one number of the store that a look reads: how often there has been news of each kind, and
// how many hosts look.
struct NewsCount {
  // What one question, one ring and one more host, or process that looks for itself, add to the
  // number.
  static constexpr int64_t kQuestion = 1;
  static constexpr int64_t kRing = int64_t{1} << 24;
  static constexpr int64_t kLooker = int64_t{1} << 47;

  int64_t questions = 0;
  int64_t rings = 0;
  // Hosts that have looked, and processes that have looked for themselves, also ended ones.
  int64_t lookers = 0;

  // Adds `what` to the number, which may be 0, and returns the sum. Raises the board's errors.
  static NewsCount add(SharedBoard& board, int64_t what);

  // Returns the interval of each host's looks. One process serves the store for all of them: it
  // gets at most 256 looks a second, of up to 64 hosts one every 250 ms, of 512 one every 2 s. So a
  // ring of 512 hosts may take 2 s to arrive, and answers for the status take as much longer.
  std::chrono::milliseconds interval() const {
    constexpr int64_t kUsual = 64;
    constexpr std::chrono::milliseconds kUsualInterval{250};
    return kUsualInterval * std::max(lookers, kUsual) / kUsual;
  }
};

// Keys of the store: the place (LocalProcesses.hpp) of a host by its number, from 1 to the number
// of lookers, which some lookers lack; and the latest answer of the host at a place, which begins
// with the number of its question and a blank.
std::string keyOfHost(int64_t number);
std::string keyOfAnswer(const std::string& place);

// This process's looks into one store, in a separate thread, until the last group or the store is
// gone. One process of each host at a time looks unasked. It has the others look when a rank has
// rung, over their status servers, and answers other hosts' questions for all of them. If it is
// stopped or gone, another process of the host takes over within about a second. A process without
// a status server looks for itself, and answers nothing. Thread-safe.
class News {
 public:
  // `store`: the store's name, equal on all hosts. Raises std::runtime_error if no thread can be
  // started.
  News(const std::string& store, std::shared_ptr<SharedBoard> board);
  ~News();
  News(const News&) = delete;
  News& operator=(const News&) = delete;

  // Notifies `diagnosis`, while it exists, whenever a rank rings for `group`, including this rank.
  // Also notifies it once now, since ranks may have rung before, and when the store is gone.
  void listen(uint64_t group, const std::shared_ptr<HangDiagnosis>& diagnosis);
  // Makes the thread ring for the group soon.
  void ring(uint64_t group);
  // Rings for the group in the calling thread. May block, and raises the board's errors.
  static void ring(SharedBoard& board, uint64_t group);
  // Makes the thread look soon, if `store` is the hash of the store's name.
  void look(uint64_t store);
  // Returns by how much more than a second a ring may be late.
  std::chrono::milliseconds slack() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the thread, which may block long in the store
};

}  // namespace torchcomms_pg::status
