// Host streams.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "host/HostStream.hpp"

namespace test {

// A stream with one worker thread.
class Stream : public torchcomms_pg::host::HostStream {
 public:
  Stream() : worker_([this] { work(); }) {}
  ~Stream() override {
    enqueue(nullptr);
    worker_.join();
  }
  void enqueue(std::function<void()> task) override {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }
  void synchronize() {
    std::mutex mutex;
    std::condition_variable done;
    bool ended = false;
    std::unique_lock lock(mutex);
    enqueue([&] {
      std::lock_guard inner(mutex);
      ended = true;
      done.notify_one();
    });
    done.wait(lock, [&] { return ended; });
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (task == nullptr) return;
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread worker_;
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
