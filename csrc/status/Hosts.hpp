// Exchanges the status of processes between the hosts of a job, through the job's store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "monitor/HangDiagnosis.hpp"
#include "status/JobReport.hpp"

namespace torchcomms_pg::status {

// This process's part in that exchange, for one store. On each host one process at a time looks
// into the store four times a second, in a separate thread. If another host asks, that process
// answers for all processes of its host. When it is stopped or gone, another process takes over.
// Thread-safe.
class Hosts {
 public:
  using MakeBoard = std::function<std::unique_ptr<SharedBoard>()>;  // opens a connection

  // `store`: the store's name, equal on all hosts. Raises std::runtime_error if no thread can be
  // started.
  Hosts(std::string store, MakeBoard makeBoard);
  ~Hosts();
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  const std::string& store() const;

  // The other hosts' answers.
  struct Told {
    std::vector<HostStatus> hosts;
    std::vector<UnreachedHost> unreached;
  };
  // ask() asks all other hosts. take() returns their answers, when all have arrived, at `until`, or
  // as soon as `enough`, which is called with each answer, returns true.
  void ask(std::chrono::steady_clock::time_point until);
  Told take(
      std::chrono::steady_clock::time_point until,
      const std::function<bool(const HostStatus&)>& enough);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with threads, which may block long in the store
};

}  // namespace torchcomms_pg::status
