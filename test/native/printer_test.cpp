// Lines on stderr, and who waits for them.
#include <algorithm>
#include <chrono>
#include <string>

#include "FullPipe.hpp"
#include "Ranks.hpp"
#include "monitor/Printer.hpp"

using namespace test;
using namespace torchcomms_pg;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(aStderrThatNobodyReadsHoldsUpNobodyWhoPrints) {
  FullPipe pipe;
  printLine("first");
  printLine("second");
  CHECK(!awaitPrinted(milliseconds(10)));
  CHECK_EQUAL(pipe.readUntil("second\n"), "first\nsecond\n");
  CHECK(awaitPrinted(seconds(20)));
}

TEST(whatNobodyReadsIsKeptUpToALimitAndTheRestIsCounted) {
  constexpr int kLines = 30, kKept = 10;
  FullPipe pipe;
  for (int i = 0; i < kLines; ++i) printLine(std::string(100'000, 'y'));
  std::string text;
  while (std::count(text.begin(), text.end(), '\n') < kKept) text += pipe.readUntil("\n");
  CHECK(awaitPrinted(seconds(20)));
  printLine("after it");
  CHECK_EQUAL(
      pipe.readUntil("after it\n"),
      "torchcomms_pg: 20 lines are lost: nobody reads stderr\nafter it\n");
}

#if !defined(__SANITIZE_THREAD__)  // which starts no thread in the child of a process with threads
TEST(aForkedChildPrintsThoughItsParentCannot) {
  FullPipe pipe;
  printLine("the parent's");
  Processes processes;
  processes.start([] {
    FullPipe own;
    printLine("the child's");
    CHECK_EQUAL(own.readUntil("child's\n"), "the child's\n");
  });
  processes.join(0);
}
#endif
