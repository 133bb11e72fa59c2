// Two ranks, which are threads, of a program that has the library's objects and none of the
// diagnosis.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>

#include "collectives/Collectives.hpp"
#include "connect/Connect.hpp"

namespace torchcomms_pg {
namespace {

constexpr Milliseconds kJoining{60'000};
constexpr Milliseconds kDeadline{300};

std::shared_ptr<Communicator> join(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  RendezvousInfo info{store, rank, 2, {}, "both", kJoining};
  info.group.name = "both";
  return connectHosts(info, nullptr);
}

void reduce(Communicator& comm, float value, float wanted) {
  auto tensor = at::full({7}, value);
  collectives::allReduce(
      comm, {.async = false, .timeout = std::nullopt}, tensor, tensor, c10d::ReduceOp::SUM);
  TORCH_CHECK(tensor.eq(wanted).all().item<bool>(), "wrong sum: ", tensor);
}

// Calls an operation to which the other rank does not come. Prints the error.
void miss(Communicator& comm) {
  try {
    auto tensor = at::ones({7});
    collectives::allReduce(
        comm, {.async = false, .timeout = kDeadline}, tensor, tensor, c10d::ReduceOp::SUM);
    TORCH_CHECK(false, "an operation has ended to which one rank has not come");
  } catch (const CommError& error) {
    TORCH_CHECK(error.failure().type == c10d::ErrorType::TIMEOUT, "another error");
    std::printf("%s\n", error.failure().text().c_str());
  }
}

int run() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::exception_ptr failed;
  std::thread other([&] {
    try {
      const auto comm = join(store, 1);
      reduce(*comm, 2, 3);
      // Comes to nothing else, and goes when rank 0 has failed the group.
      while (comm->failureMessage().empty()) {
        std::this_thread::yield();
      }
      comm->close();
    } catch (...) {
      failed = std::current_exception();
    }
  });
  const auto comm = join(store, 0);
  reduce(*comm, 1, 3);
  miss(*comm);
  other.join();
  comm->close();
  if (failed) {
    std::rethrow_exception(failed);
  }
  return 0;
}

}  // namespace
}  // namespace torchcomms_pg

int main() {
  try {
    return torchcomms_pg::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
