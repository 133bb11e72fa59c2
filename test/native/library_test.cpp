// The real libnccl, on a machine that may have no GPU and no driver.
#include <cstring>
#include <stdexcept>
#include <string>

#include "Ranks.hpp"
#include "nccl/Allocator.hpp"
#include "nccl/Libnccl.hpp"

using namespace test;
using torchcomms_pg::CollectiveKind;
using torchcomms_pg::Libnccl;
using torchcomms_pg::Library;
using torchcomms_pg::LibraryError;
using torchcomms_pg::NcclApi;

namespace {

const Libnccl& loaded() {
  return Libnccl::load({.path = "", .folder = NCCL_FOLDER});
}

// Returns the functions of an NCCL before 2.28.3.
NcclApi older() {
  NcclApi table = nccl();
  table.allToAll = nullptr;
  table.gather = nullptr;
  table.scatter = nullptr;
  return table;
}

void exchangesWithoutLateFunctions(ncclComm_t comm, int rank) {
  const Library old(older());
  int ranks = 0;
  CHECK_NCCL(nccl().commCount(comm, &ranks));
  for (const size_t count : {1, 5, 100'000}) {
    std::vector<float> in(ranks * count), out(ranks * count, -1);
    for (size_t i = 0; i < in.size(); ++i) in[i] = 100.0f * rank + i / count;
    const auto each = CollectiveKind::allToAll;
    CHECK_NCCL(old.run({each, in.data(), out.data(), count, ncclFloat32}, comm, nullptr));
    for (size_t i = 0; i < out.size(); ++i) CHECK_EQUAL(out[i], 100.0f * (i / count) + rank);
    for (int root = 0; root < ranks; ++root) {
      std::vector<float> all(rank == root ? ranks * count : 0, -1), part(count, -1);
      const auto moves = [&](CollectiveKind kind, std::vector<float>& to) {
        CHECK_NCCL(old.run({kind, in.data(), to.data(), count, ncclFloat32, root}, comm, nullptr));
      };
      moves(CollectiveKind::gather, all);
      for (size_t i = 0; i < all.size(); ++i) CHECK_EQUAL(all[i], 100.0f * (i / count));
      moves(CollectiveKind::scatter, part);
      for (const float value : part) CHECK_EQUAL(value, 100.0f * root + rank);
    }
  }
}

}  // namespace

TEST(realLibraryAnswersWithoutADriver) {
  const auto& library = loaded();
  CHECK(library.version() >= 21800);
  CHECK(library.path().find("libnccl") != std::string::npos);
  CHECK_CONTAINS(std::string(library.getErrorString(ncclInvalidUsage)), "invalid usage");
  ncclUniqueId first, second;
  CHECK_NCCL(library.getUniqueId(&first));
  CHECK_NCCL(library.getUniqueId(&second));
  CHECK(std::memcmp(&first, &second, sizeof first) != 0);
}

TEST(aFileIsLoadedOnce) {
  CHECK_EQUAL(&loaded(), &loaded());
  CHECK_EQUAL(&Libnccl::load({.path = loaded().path(), .folder = ""}), &loaded());
}

TEST(initOfTheRealLibraryFailsWithItsReasonWhereThereIsNoGpu) {
  const auto& library = loaded();
  ncclUniqueId id;
  CHECK_NCCL(library.getUniqueId(&id));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  const auto result = library.init(&comm, {&id, 1}, 1, 0, &config);
  if (result == ncclSuccess || result == ncclInProgress) return;  // there is a GPU
  CHECK_EQUAL(result, ncclUnhandledCudaError);
  CHECK(comm == nullptr);
  CHECK_CONTAINS(std::string(library.getLastError(nullptr)), "driver");
}

TEST(lateFunctionsFallBackToMessages) {
  for (int ranks = 1; ranks <= 3; ++ranks) threadRanks(ranks, exchangesWithoutLateFunctions);
}

TEST(theLibraryOfAnotherNameIsLookedForUnderIt) {
  loaded();  // is not taken for it
  try {
    Libnccl::load({.path = "", .folder = "/nowhere", .soname = "librccl.so.1"});
    CHECK(false);
  } catch (const LibraryError& error) {
    CHECK_CONTAINS(std::string(error.what()), "none is librccl.so.1");
    CHECK_CONTAINS(std::string(error.what()), "/nowhere/lib/librccl.so.1");
    CHECK_CONTAINS(std::string(error.what()), "\n  librccl.so.1: ");
  }
}

TEST(theAllocatorOfTheRealLibraryGivesMemoryOrSaysWhyNot) {
  allocateWith(loaded());
  allocateWith(loaded());
  try {
    void* const memory = torchcomms_pg_allocate(1 << 20, 0, nullptr);
    CHECK(memory != nullptr);  // there is a GPU
    torchcomms_pg_free(memory, 1 << 20, 0, nullptr);
  } catch (const std::runtime_error& error) {
    CHECK_CONTAINS(std::string(error.what()), "ncclMemAlloc of 1048576 bytes");
    CHECK_CONTAINS(std::string(error.what()), "driver");
  }
}
