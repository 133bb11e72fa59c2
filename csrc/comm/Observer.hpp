// What the library notifies of its operations, so that a part above it can find out why operations
// do not end. Without an observer the library works, too: a deadline then ends an operation with no
// more than "timed out".
#pragma once

#include <nccl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/AtomicShared.hpp"
#include "host/Peer.hpp"
#include "monitor/MonitorThread.hpp"
#include "operation/CommError.hpp"
#include "operation/Operation.hpp"

namespace torchcomms_pg {

class CommHandle;
class Identity;
class InFlightOps;
class IssueCounts;
class Relaxations;

// Why an operation does not end.
struct Explanation {
  std::vector<int> ranks;  // this field, `verdict` and `parting` are for a Failure
  std::string summary;     // the cause, for an error's first line; empty if unknown
  std::string verdict;
  std::string parting;
  // If positive, nothing has failed: the operation may take that much longer, as `verdict` says.
  Milliseconds extension{0};

  void addTo(Failure& failure) const {
    failure.verdict = verdict;
    failure.parting = parting;
    if (!ranks.empty()) {
      failure.ranks = ranks;
    }
  }
};

// Notified when an operation ends.
class EndObserver {
 public:
  virtual ~EndObserver() = default;
  virtual void end() = 0;
};

// The parts of a communicator that its observer may ask, and which outlive the observer.
struct Observed {
  const Identity& self;
  const CommHandle& library;
  const InFlightOps& inFlight;
  const IssueCounts& issued;
  const Relaxations& relaxations;
  const AtomicShared<const Failure>& failure;  // null before the communicator fails
};

// The observer of one communicator. By default it observes nothing. Methods without a comment on
// their thread may be called by any.
class Observer {
 public:
  virtual ~Observer() = default;

  // All ranks have connected, and share `store`, in which the keys of this communicator begin with
  // `prefix`. `peers`: the ranks' processes.
  virtual void open(
      const c10::intrusive_ptr<c10d::Store>& /*store*/, const std::string& /*prefix*/,
      const std::vector<Peer>& /*peers*/) {}
  // The communicator ends. Must not block. May be called again.
  virtual void close() {}

  // Methods for the monitor's thread; none may block.
  //
  // Does what is due, once in each round.
  virtual void check(Clock::time_point /*now*/) REQUIRES(monitorThread) {}
  // Explains why `op` has not ended within its timeout. Returns nullopt while that is not known
  // yet; the monitor then asks again in its next round.
  virtual std::optional<Explanation> ask(const Operation& /*op*/, Clock::time_point /*now*/) {
    return Explanation{};
  }
  // Returns the explanation with which other ranks have failed the group, if they have.
  virtual std::optional<Explanation> final() { return std::nullopt; }

  // Methods that may block, for some seconds at most.
  //
  // Explains why `op` has not ended after a wait of `timeout` that should have ended at `deadline`.
  virtual Explanation await(
      const Operation& /*op*/, Milliseconds /*timeout*/, Clock::time_point /*deadline*/) {
    return {};
  }
  // Explains the library's failure `why` of `op`, or returns nullopt if nothing more is known.
  virtual std::optional<Explanation> onFailure(
      const Operation& /*op*/, ncclResult_t /*result*/, const std::string& /*why*/) {
    return std::nullopt;
  }
  // Explains a failure that other ranks have found.
  virtual std::optional<Explanation> awaitOthers() { return std::nullopt; }
  // Returns why `ranks` have left the group, as "; rank 1 ...", or "".
  virtual std::string leftWords(const std::vector<int>& /*ranks*/) { return ""; }
  // The communicator has failed, and no call has requested that.
  virtual void failed(const Failure& /*failure*/) {}
  // Makes other ranks write their flight recorders' dumps, and waits until the group's ranks have.
  virtual void askForDumps() {}
  virtual void awaitDumps(Milliseconds /*patience*/) {}

  // Methods for threads that issue operations and wait for them.
  //
  // The calling thread arrives at collective `seq`.
  virtual void arrive(uint64_t /*seq*/, Clock::time_point /*at*/) {}
  // The thread has issued that collective asynchronously. Returns whom its end is notified to, or
  // null.
  virtual std::shared_ptr<EndObserver> follow() { return nullptr; }
  // The thread begins to wait in a call.
  virtual void beginWait() {}
  // The thread has waited for other ranks. `collective`: in a collective.
  virtual void wait(Clock::duration /*time*/, bool /*collective*/) {}
};

// The observer of this process. By default it observes nothing.
class ProcessObserver {
 public:
  virtual ~ProcessObserver() = default;

  // Makes the observer of a communicator, which owns it.
  virtual std::unique_ptr<Observer> observe(const Observed& /*comm*/) {
    return std::make_unique<Observer>();
  }
  // A process group of this process begins to exist, and ends when the result, which may be null,
  // is destroyed. `rank`: this process's global rank.
  virtual std::shared_ptr<void> hold(int /*rank*/) { return nullptr; }
  // The process is about to end without destructors. May block, for a second at most.
  virtual void beforeExit() {}

  // Sets the observer, once, before the first group; it is never freed.
  static void set(ProcessObserver* observer) { observer_ = observer; }
  static ProcessObserver& get() {
    static ProcessObserver nothing;
    return observer_ == nullptr ? nothing : *observer_;
  }

 private:
  static inline ProcessObserver* observer_ = nullptr;
};

}  // namespace torchcomms_pg
