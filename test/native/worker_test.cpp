// The host stream that runs asynchronous operations.
#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "Check.hpp"
#include "device/WorkerStream.hpp"

using torchcomms_pg::WorkerStream;

TEST(tasksRunInOrderAndNeverTwoAtOnce) {
  std::vector<int> order;  // unguarded: ThreadSanitizer sees it if two tasks overlap
  {
    WorkerStream stream("test");
    for (int i = 0; i < 1000; ++i) stream.enqueue([&order, i] { order.push_back(i); });
  }  // runs what is queued
  CHECK_EQUAL(order.size(), 1000u);
  for (int i = 0; i < 1000; ++i) CHECK_EQUAL(order[i], i);
}

TEST(tasksOfSeveralThreadsAllRun) {
  std::atomic<int> ran{0};
  {
    WorkerStream stream("test");
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 250; ++i) stream.enqueue([&] { ran.fetch_add(1); });
      });
    }
    for (auto& thread : threads) thread.join();
  }
  CHECK_EQUAL(ran.load(), 1000);
}

TEST(handedOverLeadLetsATaskWaitForTheNext) {
  std::promise<void> second;
  std::promise<void> first;
  WorkerStream stream("test");  // ends before what its tasks use
  stream.enqueue([&] {
    stream.handOver();
    second.get_future().wait();
    first.set_value();
  });
  stream.enqueue([&] { second.set_value(); });
  first.get_future().wait();
}

TEST(nestedHandOversKeepTheOrderOfWhatFollows) {
  std::vector<std::promise<void>> reached(5);
  std::promise<void> all;
  WorkerStream stream("test");
  for (int i = 0; i < 5; ++i) {
    stream.enqueue([&, i] {
      stream.handOver();
      reached[i].set_value();
      if (i + 1 < 5) {
        reached[i + 1].get_future().wait();
      } else {
        all.set_value();
      }
    });
  }
  all.get_future().wait();
}

TEST(helpRunsTasksInTheCallingThreadUnlessAWorkerLeads) {
  WorkerStream stream("test");
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> done{false};
    stream.enqueue([&] { done.store(true); });
    while (!done.load()) stream.runQueued([&] { return done.load(); });
  }
}

TEST(whatIsDeferredRunsOnceItIsWantedAndNotBefore) {
  for (const bool helped : {false, true}) {
    std::promise<std::thread::id> ran;
    WorkerStream stream("test");  // without a thread, which might find the task by itself
    CHECK(stream.idle());
    stream.defer();
    stream.enqueue([&] { ran.set_value(std::this_thread::get_id()); });
    CHECK(!stream.idle());
    auto runner = ran.get_future();
    if (helped) {
      stream.runQueued([] { return false; });
    } else {
      CHECK(runner.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
      stream.wake();
    }
    CHECK_EQUAL(runner.get() == std::this_thread::get_id(), helped);
  }
}

TEST(whatIsDeferredRunsBeforeItsStreamEnds) {
  bool ran = false;
  {
    WorkerStream stream("test");
    stream.start();
    stream.defer();
    stream.enqueue([&] { ran = true; });
  }
  CHECK(ran);
}

TEST(drainedStreamHasRunAllThatWasQueued) {
  int ran = 0;  // unguarded: ThreadSanitizer sees it if a task still runs
  WorkerStream stream("test");
  stream.drain();
  for (int round = 1; round <= 200; ++round) {
    if (round % 2 == 0) stream.defer();
    for (int i = 0; i < 3; ++i) stream.enqueue([&] { ++ran; });
    stream.drain();
    CHECK_EQUAL(ran, 3 * round);
  }
}

TEST(severalThreadsMayDrainAStreamAtOnce) {
  std::atomic<int> ran{0};
  WorkerStream stream("test");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const int before = ran.load();
        stream.enqueue([&] { ran.fetch_add(1); });
        stream.drain();
        CHECK(ran.load() > before);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQUAL(ran.load(), 200);
}

TEST(taskThatDrainsItsStreamDoesNotWaitForItself) {
  std::promise<void> drained;
  WorkerStream stream("test");  // ends before what its tasks use
  stream.enqueue([&] {
    stream.drain();
    drained.set_value();
  });
  stream.enqueue([] {});
  drained.get_future().wait();
}

TEST(taskMayDropTheLastReferenceToItsStream) {
  // Shared, since the worker may still be leaving set_value() when the wait ends.
  const auto gone = std::make_shared<std::promise<void>>();
  auto stream = std::make_shared<WorkerStream>("test");
  auto signal = std::shared_ptr<void>(nullptr, [gone](void*) { gone->set_value(); });
  auto* raw = stream.get();
  raw->enqueue([stream, signal]() mutable {
    stream.reset();
    signal.reset();
  });
  stream.reset();
  signal.reset();
  gone->get_future().wait();
}
