// Host streams.
#pragma once

#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <utility>

#include "device/WorkerStream.hpp"
#include "host/HostStream.hpp"

namespace test {

// A stream with a thread of its own.
class Stream : public torchcomms_pg::host::HostStream {
 public:
  void enqueue(std::function<void()> task) override { worker_.enqueue(std::move(task)); }
  void synchronize() {
    // Shared, since the worker may still be leaving set_value() when the wait ends.
    const auto ended = std::make_shared<std::promise<void>>();
    enqueue([ended] { ended->set_value(); });
    ended->get_future().wait();
  }

 private:
  torchcomms_pg::WorkerStream worker_{"test"};
};

// A stream whose tasks run on request, in the thread that asks.
class LaterStream : public torchcomms_pg::host::HostStream {
 public:
  void enqueue(std::function<void()> task) override { tasks_.push_back(std::move(task)); }
  bool idle() override { return tasks_.empty(); }
  void run() {
    for (; !tasks_.empty(); tasks_.pop_front()) tasks_.front()();
  }

 private:
  std::deque<std::function<void()>> tasks_;
};

}  // namespace test
