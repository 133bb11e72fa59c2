// Memory that runs out when the test says so.
#pragma once

namespace test {

// How many allocations of this thread succeed before one fails; negative: none does.
extern thread_local int allocationsLeft;

}  // namespace test
