// Registrations with a communicator, over a table that keeps a record; and libnccl's own allocator,
// on a machine that may have no GPU.
#include <stdexcept>
#include <string>

#include "Ranks.hpp"
#include "nccl/Memory.hpp"

using namespace test;
using torchcomms_pg::allocateWith;
using torchcomms_pg::Library;
using torchcomms_pg::NcclApi;
using torchcomms_pg::Registrations;
using torchcomms_pg::Segment;

namespace {

std::string calls;
ncclResult_t answer = ncclSuccess;

void note(const char* what, const void* where) {
  calls += std::string(what) + std::to_string(reinterpret_cast<uintptr_t>(where)) + " ";
}

ncclResult_t take(const ncclComm_t, void* buffer, size_t, void** handle) {
  note("+", buffer);
  *handle = buffer;
  return answer;
}

ncclResult_t give(const ncclComm_t, void* handle) {
  note("-", handle);
  return answer;
}

ncclResult_t takeWindow(ncclComm_t, void* buffer, size_t, ncclWindow_t* window, int flags) {
  note(flags == NCCL_WIN_COLL_SYMMETRIC ? "+w" : "+?", buffer);
  *window = static_cast<ncclWindow_t>(buffer);
  return answer;
}

ncclResult_t giveWindow(ncclComm_t, ncclWindow_t window) {
  note("-w", window);
  return answer;
}

const NcclApi& recording() {
  static const NcclApi table = [] {
    NcclApi t;
    t.commRegister = take;
    t.commDeregister = give;
    t.commWindowRegister = takeWindow;
    t.commWindowDeregister = giveWindow;
    return t;
  }();
  return table;
}

Segment at(uintptr_t address, size_t bytes = 8) {
  return {reinterpret_cast<void*>(address), bytes};
}

void add(Registrations& to, const Segment& segment, bool symmetric = false, uint64_t pool = 1) {
  CHECK_NCCL(to.add(nullptr, {0, pool}, segment, symmetric));
}

std::string since() {
  return std::exchange(calls, "");
}

}  // namespace

TEST(aSegmentIsRegisteredOnceAndDeregisteredWithItsPool) {
  Registrations all(recording());
  add(all, at(16));
  add(all, at(32));
  add(all, at(16));
  add(all, at(48), false, 2);
  CHECK_EQUAL(since(), "+16 +32 +48 ");
  CHECK(all.remove({0, 1}) == ncclSuccess);
  CHECK_EQUAL(since(), "-16 -32 ");
  CHECK(!all.remove({0, 1}).has_value());
  all.removeAll();
  CHECK_EQUAL(since(), "-48 ");
}

TEST(aSegmentOfAnotherSizeOrUseAtTheAddressReplacesTheFormer) {
  Registrations all(recording());
  add(all, at(16));
  add(all, at(16, 24));
  CHECK_EQUAL(since(), "+16 -16 +16 ");
  add(all, at(16, 24), true);
  add(all, at(16, 24), true);
  CHECK_EQUAL(since(), "-16 +w16 ");
  CHECK(all.remove({0, 1}) == ncclSuccess);
  CHECK_EQUAL(since(), "-w16 ");
}

TEST(memoryThatIsFreedIsDeregisteredFromAllCommunicatorsFirst) {
  Registrations one(recording()), other(recording());
  add(one, at(16));
  add(one, at(32));
  add(other, at(16));
  since();
  Registrations::released(at(16).address);
  CHECK_EQUAL(since(), "-16 -16 ");
  CHECK(one.remove({0, 1}) == ncclSuccess && other.remove({0, 1}) == ncclSuccess);
  CHECK_EQUAL(since(), "-32 ");
}

TEST(whatALostCommunicatorHadRegisteredIsForgotten) {
  Registrations all(recording());
  add(all, at(16));
  all.forget();
  since();
  Registrations::released(at(16).address);
  CHECK(!all.remove({0, 1}).has_value());
  CHECK_EQUAL(since(), "");
}

TEST(aRefusedSegmentIsNotHeldForRegistered) {
  Registrations all(recording());
  answer = ncclInvalidUsage;
  CHECK_EQUAL(all.add(nullptr, {0, 1}, at(16), false), ncclInvalidUsage);
  answer = ncclSuccess;
  since();
  CHECK(all.remove({0, 1}) == ncclSuccess);
  CHECK_EQUAL(since(), "");
}

TEST(theAllocatorOfTheRealLibraryGivesMemoryOrSaysWhyNot) {
  const auto& library = Library::load({.path = "", .folder = NCCL_FOLDER});
  allocateWith(library);
  allocateWith(library);
  try {
    void* const memory = torchcomms_pg_allocate(1 << 20, 0, nullptr);
    CHECK(memory != nullptr);  // there is a GPU
    torchcomms_pg_free(memory, 1 << 20, 0, nullptr);
  } catch (const std::runtime_error& error) {
    CHECK_CONTAINS(std::string(error.what()), "ncclMemAlloc of 1048576 bytes");
    CHECK_CONTAINS(std::string(error.what()), "driver");
  }
}
