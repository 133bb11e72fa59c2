// Users' hooks on threads of the library.
#include <chrono>
#include <stdexcept>

#include "FullPipe.hpp"
#include "hooks/HookCall.hpp"

using namespace torchcomms_pg;

TEST(whatAHookRaisesIsPrintedAndGoesNowhere) {
  test::FullPipe unread;
  callHook("a hook of this test", [] { throw std::runtime_error("mine"); });
  unread.readUntil("torchcomms_pg: a hook of this test raised: mine\n");
  CHECK(awaitPrinted(std::chrono::seconds(20)));
}
