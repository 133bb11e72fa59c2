// Behaviour where no thread can be started.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <future>
#include <new>
#include <stdexcept>

#include "Messages.hpp"
#include "device/WorkerStream.hpp"
#include "monitor/Monitor.hpp"

using namespace test;
using torchcomms_pg::Monitor;
using torchcomms_pg::WorkerStream;

namespace {

thread_local bool refusedHere = false;
std::atomic<bool> refused{false};

// Keeps this thread from starting another while it lives.
struct NoThread {
  NoThread() { refusedHere = true; }
  ~NoThread() { refusedHere = false; }
};

// Keeps all threads from starting another while it lives.
struct NoThreadAtAll {
  NoThreadAtAll() { refused = true; }
  ~NoThreadAtAll() { refused = false; }
};

struct Idle : Monitor::Watched {
  void check(Monitor::Clock::time_point) noexcept override {}
  void abortInFlight(const char*) noexcept override {}
  std::string failureMessage() const override { return "watched"; }
};

template <class Body>
std::string errorOf(const Body& body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

// Replaces the C library's, for all of this program.
extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static auto* const real =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return refused || refusedHere ? EAGAIN : real(thread, attributes, run, argument);
}

TEST(aMonitorWithoutAThreadWatchesNothing) {
  {
    const NoThread none;
    CHECK_CONTAINS(errorOf([] { Monitor::watch<Idle>(); }), "no thread can be started");
  }
  CHECK(Monitor::get().failures().empty());  // which asks all that are watched
}

TEST(theMonitorsSpareThreadRunsWhatHasNone) {
  const Monitor::Hold hold;
  std::promise<void> first, second;
  {
    const NoThread none;
    Monitor::get().runDetached([&] { first.set_value(); });
    Monitor::get().runDetached([&] { second.set_value(); });
    first.get_future().wait();
    second.get_future().wait();
  }
}

TEST(aTaskThatRaisesEndsNeitherTheProcessNorTheSpareThread) {
  const Monitor::Hold hold;
  const auto runsAfterOne = [] {
    std::promise<void> next;
    Monitor::get().runDetached([] { throw std::bad_alloc(); });
    Monitor::get().runDetached([&] { next.set_value(); });
    next.get_future().wait();
  };
  runsAfterOne();
  const NoThread none;
  runsAfterOne();
}

TEST(aStreamWithoutAThreadTakesNoTask) {
  std::atomic<int> ran{0};
  {
    WorkerStream stream("test");
    {
      const NoThread none;
      CHECK_CONTAINS(errorOf([&] { stream.start(); }), "no thread can be started");
      CHECK_CONTAINS(errorOf([&] { stream.enqueue([&] { ran += 100; }); }), "test");
    }
    stream.enqueue([&] { ++ran; });
  }
  CHECK_EQUAL(ran.load(), 1);
}

TEST(aStreamGoesOnWithTheThreadItHasWhereTheLeadCannotBeHandedOver) {
  std::promise<void> last;
  WorkerStream stream("test");  // ends before what its tasks use
  stream.start();
  const NoThreadAtAll none;
  stream.enqueue([&] { stream.handOver(); });
  stream.enqueue([&] { last.set_value(); });
  last.get_future().wait();
}

TEST(aMessageThatNoThreadServesIsNotPosted) {
  threadRanks(2, [](ncclComm_t comm, int rank) {
    Payload mine(8);
    if (rank == 0) {
      Completions completions;
      Payload refusedOne(16);
      Message message = test::message(refusedOne, 1, 5);
      completions.expect(message);
      {
        const NoThread none;
        CHECK_EQUAL(sendTagged(message, comm, nullptr), ncclSystemError);
      }
      CHECK_EQUAL(completions.ended(), 0u);
      CHECK_NCCL(sendTagged(test::message(mine, 1, 5), comm, nullptr));
    } else {
      CHECK_NCCL(recvTagged(test::message(mine, 0, 5), comm, nullptr));
    }
  });
}
