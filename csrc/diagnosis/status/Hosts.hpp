// Exchanges the status of processes between the hosts of a job, through the job's store.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "diagnosis/hang/HangDiagnosis.hpp"
#include "diagnosis/status/JobReport.hpp"

namespace torchcomms_pg::status {

// This process's part in the exchange through one store. On each host one process at a time looks
// into the store four times a second, in a separate thread. If another host asks, that process
// answers for all processes of its host. If that process is stopped or gone, another process of the
// host takes over. Thread-safe.
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
  // ask() asks all other hosts, in a separate thread, which collects answers until `until`. take()
  // waits for the answers and returns them: when all have arrived, when `enough` returns true for
  // one of them, or at `until`.
  void ask(std::chrono::steady_clock::time_point until);
  Told take(
      std::chrono::steady_clock::time_point until,
      const std::function<bool(const HostStatus&)>& enough);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with threads, which may block long in the store
};

}  // namespace torchcomms_pg::status
