// Memory that runs out on a test's request.
#pragma once

namespace test {

// Number of allocations of this thread that succeed before one fails; negative: none fails.
extern thread_local int allocationsLeft;

// Whether those after it fail, too.
extern thread_local bool memoryStaysOut;

}  // namespace test
