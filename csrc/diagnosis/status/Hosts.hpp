// Exchanges the status of processes between the hosts of a job, through the job's store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "diagnosis/hang/SharedBoard.hpp"
#include "diagnosis/status/News.hpp"
#include "diagnosis/status/ProcessStatus.hpp"

namespace torchcomms_pg::status {

// This process's questions to the other hosts, through one store, and its answers to theirs (News).
// Thread-safe.
class Hosts {
 public:
  // `store`: the store's name, equal on all hosts. Raises std::runtime_error if no thread can be
  // started.
  Hosts(const std::string& store, std::shared_ptr<SharedBoard> board);
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  News& news() { return news_; }

  // The other hosts' answers.
  struct Told {
    std::vector<HostStatus> hosts;
    std::vector<UnreachedHost> unreached;
  };
  // ask() asks all other hosts, in a separate thread, which collects answers until `until`. take()
  // waits for the answers and returns them: when all have arrived, when `enough` returns true for
  // one of them, or at `until`.
  void ask(std::chrono::steady_clock::time_point until);
  Told take(
      std::chrono::steady_clock::time_point until,
      const std::function<bool(const HostStatus&)>& enough);

 private:
  struct State;
  News news_;
  const std::shared_ptr<State> state_;  // shared with a thread, which may block long in the store
};

}  // namespace torchcomms_pg::status
