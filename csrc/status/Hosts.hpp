// The hosts of a job tell each other the status of their processes through the job's store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "monitor/HangDiagnosis.hpp"
#include "status/JobReport.hpp"

namespace torchcomms_pg::status {

// This process's part in that, for one store. A thread looks there four times a second whether
// another host asks, and answers for all processes of this one; of those only one does at a time,
// and the next goes on where that is stopped or gone. Thread-safe.
class Hosts {
 public:
  using MakeBoard = std::function<std::unique_ptr<SharedBoard>()>;  // makes a connection

  // `store`: names it, the same on all hosts. Raises std::runtime_error if no thread can be
  // started.
  Hosts(std::string store, MakeBoard makeBoard);
  ~Hosts();
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  const std::string& store() const;

  // What the other hosts have told.
  struct Told {
    std::vector<HostStatus> hosts;
    std::vector<UnreachedHost> unreached;
  };
  // Asks all other hosts, whose answers take() returns, once all are there or `until`; or before,
  // as soon as `enough`, which is called with each, returns true.
  void ask(std::chrono::steady_clock::time_point until);
  Told take(
      std::chrono::steady_clock::time_point until,
      const std::function<bool(const HostStatus&)>& enough);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with threads, which may be in the store for long
};

}  // namespace torchcomms_pg::status
