// Words about a Python that does not answer.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "Check.hpp"
#include "monitor/PythonStackDump.hpp"

using namespace test;
using std::chrono::milliseconds;
using torchcomms_pg::PythonStackDump;

namespace {

// A thread that asks Python, until the end of the process.
enum class Asks { looksAgainAndAgain, sleeps, hasTheGil };
Asks asks;

PythonStackDump::Told ask(const PythonStackDump::Stacks&, const std::function<void()>& held) {
  if (asks == Asks::hasTheGil) held();
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  for (;;) {
    never.wait_for(lock, asks == Asks::sleeps ? milliseconds(100'000) : milliseconds(5));
  }
}

std::string toldBy(Asks how) {
  asks = how;
  const auto dump = std::make_unique<PythonStackDump>(PythonStackDump::Stacks{});
  while (!dump->ready()) std::this_thread::sleep_for(milliseconds(5));
  return dump->tell().threads;
}

}  // namespace

TEST(theGilIsSaidToBeHeldOnlyIfAThreadHasOftenLookedForIt) {
  PythonStackDump::setSource({ask, [] { return std::string("a.py:3 in f"); }});
  CHECK_EQUAL(
      toldBy(Asks::looksAgainAndAgain),
      "a thread holds the GIL and does not give it back, most likely in native code; Python's "
      "stacks:\na.py:3 in f");
}

TEST(aThreadThatGetsNoCpuDoesNotProveThatTheGilIsHeld) {
  PythonStackDump::setSource({ask, [] { return std::string(); }});
  CHECK_EQUAL(
      toldBy(Asks::sleeps),
      "a thread holds the GIL, or this process gets too little CPU time to ask");
}

TEST(whoHasTheGilIsSlowAndDoesNotWaitForIt) {
  PythonStackDump::setSource({ask, [] { return std::string(); }});
  CHECK_EQUAL(toldBy(Asks::hasTheGil), "Python has not told its stacks in time");
}
