// This process's connection to the job's store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/FairLock.hpp"
#include "base/Mutex.hpp"
#include "diagnosis/status/Hosts.hpp"

namespace torchcomms_pg {

// The one connection over which this process's diagnosis speaks to a store, and over which the
// library looks for news. It is not torch's own, in which a thread of the program may block for
// long. It is opened at the first call, since many programs never need it. Threads' calls follow
// each other in the order of their begin.
//
// A store that hangs blocks all callers, and for any time, as TCPStore does. So a thread for which
// others wait with a limit makes the call (HangDiagnosis, Monitor::runDetached), and none waits
// without one. A connection that has ended stays so: another job may have its server at the same
// address by now. Then call() raises c10::DistStoreError, before TCPStore prints a C++ trace, as it
// does for each call that finds its server gone. A server that ends between this look and the call
// is still reported by TCPStore.
//
// Keeps no TCPStore of the program, and so not its server: a program may need the server's port
// again when its groups are destroyed. In a forked child of() returns a new object, and the
// parent's is only destroyed, which closes the child's copy of the descriptor. Thread-safe.
class JobStore : public std::enable_shared_from_this<JobStore> {
 public:
  // Returns the connection to a store, without its prefixes. All callers in a process share it.
  static std::shared_ptr<JobStore> of(const c10::intrusive_ptr<c10d::Store>& prefixed);
  // Returns the connection to the store of a TCPStore's server.
  static std::shared_ptr<JobStore> at(const std::string& host, uint16_t port);

  JobStore(std::string address, c10::intrusive_ptr<c10d::Store> store)
      : address_(std::move(address)), shared_(std::move(store)) {}
  JobStore(std::string host, uint16_t port)
      : address_(host + ":" + std::to_string(port)), host_(std::move(host)), port_(port) {}

  // Returns body(store). Raises c10::DistStoreError if no process serves the store, which takes 2 s
  // at most to find out, and usually no time; or if a new connection gets no answer for 30 s.
  template <class Body>
  auto call(const Body& body) {
    const FairLock::Held held(turn_);
    return body(connected());
  }

  // Returns the store's name: "HOST:PORT", or the path of a FileStore. It is the same in all
  // processes.
  const std::string& address() const { return address_; }

  // Returns this process's looks into the store, and its questions to other hosts, which last while
  // a group holds them. Raises std::runtime_error if no thread can be started.
  std::shared_ptr<status::Hosts> hosts();
  // Returns what hosts() has returned for all stores, and is still held.
  static std::vector<std::shared_ptr<status::Hosts>> allHosts();

  // Returns whether the server has ended, as far as this connection shows.
  bool hasEnded() const;

 private:
  c10d::Store& connected() REQUIRES(turn_);

  const std::string address_;
  const c10::intrusive_ptr<c10d::Store> shared_;  // null for a TCPStore
  const std::string host_;
  const uint16_t port_ = 0;
  Mutex mutex_;
  std::weak_ptr<status::Hosts> hosts_ GUARDED_BY(mutex_);
  FairLock turn_;
  c10::intrusive_ptr<c10d::Store> connection_ GUARDED_BY(turn_);  // set once
  std::atomic<int> descriptor_{-1};  // of `connection_`; -1 before it is open, or if not known
};

}  // namespace torchcomms_pg
