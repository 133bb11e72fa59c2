// Every collective gives the values that a plain loop gives.
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include "Ranks.hpp"
#include "Streams.hpp"
#include "Values.hpp"
#include "shm/collective/Algorithms.hpp"
#include "shm/segment/Layout.hpp"

using namespace test;
namespace shm = torchcomms_pg::shm;

namespace {

// Small numbers whose sums and products over four ranks every type holds.
double number(int rank, size_t index, ncclRedOp_t op) {
  index %= kPeriod;
  const size_t hash = index * 2654435761u >> 7 ^ index ^ static_cast<size_t>(rank) * 7919;
  if (op == ncclProd) return 1 + hash % 2;
  if (op == ncclAvg) return index % 3;  // so that the average is exact
  return hash % 3;
}

double reduced(int ranks, size_t index, ncclRedOp_t op) {
  double value = number(0, index, op);
  for (int rank = 1; rank < ranks; ++rank) {
    const double next = number(rank, index, op);
    value = op == ncclProd  ? value * next
            : op == ncclMax ? std::max(value, next)
            : op == ncclMin ? std::min(value, next)
            : op == ncclAvg ? value
                            : value + next;
  }
  return value;
}

// Sizes on both sides of every limit of the algorithms, for one type.
std::vector<size_t> countsAroundLimits(int ranks, size_t elementBytes) {
  const size_t part = shm::kStagingBytes / ranks / elementBytes;
  const size_t staging = shm::kStagingBytes / elementBytes;
  const size_t oneShot = shm::oneShotBytes(ranks) / elementBytes;
  std::vector<size_t> counts = {0, 1, 7};
  for (const size_t limit : {oneShot, part, staging / 2, staging, part * ranks}) {
    counts.insert(counts.end(), {limit - 1, limit, limit + 1});
  }
  counts.push_back(3 * staging + 5);
  return counts;
}

struct Collective {
  int ranks;
  int rank;
  ncclComm_t comm;
  ncclDataType_t type;
  ncclRedOp_t op;
  size_t count;
  int root;
  bool inPlace;
};

// Returns the blocks of all ranks, element i of rank r being value(r, i).
template <class Value>
Buffer blocks(const Collective& c, const Value& value) {
  Buffer all;
  for (int rank = 0; rank < c.ranks; ++rank) {
    const Buffer block = elements(c.type, c.count, [&](size_t i) { return value(rank, i); });
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

void expect(const Buffer& got, const Buffer& wanted, const char* what, const Collective& c) {
  // std::equal takes std::byte one by one.
  if (got.size() == wanted.size() &&
      (got.empty() || std::memcmp(got.data(), wanted.data(), got.size()) == 0)) {
    return;
  }
  size_t at = 0;
  while (got[at] == wanted[at]) ++at;
  stop(
      __FILE__, __LINE__,
      std::string(what) + ": rank " + std::to_string(c.rank) + " of " + std::to_string(c.ranks) +
          ", type " + std::to_string(c.type) + ", op " + std::to_string(c.op) + ", count " +
          std::to_string(c.count) + ", root " + std::to_string(c.root) +
          (c.inPlace ? ", in place" : "") + ": wrong from byte " + std::to_string(at));
}

// Runs ranks that issue in a stream that nothing has come to yet, among others that wait at once.
template <class Issue>
void run(const Collective& c, const Issue& issue) {
  LaterStream later;
  const bool waits = (c.rank + c.inPlace) % 2 == 0;
  CHECK_NCCL(issue(waits ? nullptr : later.handle()));
  later.run();
}

void allReduce(const Collective& c) {
  Buffer in = elements(c.type, c.count, [&](size_t i) { return number(c.rank, i, c.op); });
  Buffer out(in.size());
  void* to = c.inPlace ? in.data() : out.data();
  run(c, [&](cudaStream_t stream) {
    return nccl().allReduce(in.data(), to, c.count, c.type, c.op, c.comm, stream);
  });
  expect(
      c.inPlace ? in : out,
      elements(c.type, c.count, [&](size_t i) { return reduced(c.ranks, i, c.op); }), "all_reduce",
      c);
}

void reduce(const Collective& c) {
  Buffer in = elements(c.type, c.count, [&](size_t i) { return number(c.rank, i, c.op); });
  const Buffer before = in;
  Buffer out(in.size());
  const bool isRoot = c.rank == c.root;
  void* to = !isRoot ? nullptr : c.inPlace ? in.data() : out.data();
  run(c, [&](cudaStream_t stream) {
    return nccl().reduce(in.data(), to, c.count, c.type, c.op, c.root, c.comm, stream);
  });
  if (!isRoot) return expect(in, before, "reduce's input", c);
  expect(
      c.inPlace ? in : out,
      elements(c.type, c.count, [&](size_t i) { return reduced(c.ranks, i, c.op); }), "reduce", c);
}

void reduceScatter(const Collective& c) {
  Buffer in =
      elements(c.type, c.count * c.ranks, [&](size_t i) { return number(c.rank, i, c.op); });
  const size_t block = c.count * bytesOf(c.type);
  Buffer out(block);
  void* to = c.inPlace ? in.data() + block * c.rank : out.data();
  run(c, [&](cudaStream_t stream) {
    return nccl().reduceScatter(in.data(), to, c.count, c.type, c.op, c.comm, stream);
  });
  if (c.inPlace && block != 0) std::memcpy(out.data(), to, block);
  expect(
      out,
      elements(
          c.type, c.count, [&](size_t i) { return reduced(c.ranks, c.count * c.rank + i, c.op); }),
      "reduce_scatter", c);
}

void allGather(const Collective& c) {
  const size_t block = c.count * bytesOf(c.type);
  Buffer in = elements(c.type, c.count, [&](size_t i) { return number(c.rank, i, c.op); });
  Buffer out(block * c.ranks);
  if (c.inPlace && block != 0) std::memcpy(out.data() + block * c.rank, in.data(), block);
  const void* from = c.inPlace ? out.data() + block * c.rank : in.data();
  run(c, [&](cudaStream_t stream) {
    return nccl().allGather(from, out.data(), c.count, c.type, c.comm, stream);
  });
  expect(
      out, blocks(c, [&](int rank, size_t i) { return number(rank, i, c.op); }), "all_gather", c);
}

void broadcast(const Collective& c) {
  Buffer in = elements(c.type, c.count, [&](size_t i) { return number(c.rank, i, c.op); });
  Buffer out(in.size());
  const void* from = c.inPlace          ? static_cast<void*>(in.data())
                     : c.rank == c.root ? in.data()
                                        : nullptr;
  void* to = c.inPlace ? in.data() : out.data();
  run(c, [&](cudaStream_t stream) {
    return nccl().broadcast(from, to, c.count, c.type, c.root, c.comm, stream);
  });
  expect(
      c.inPlace ? in : out,
      elements(c.type, c.count, [&](size_t i) { return number(c.root, i, c.op); }), "broadcast", c);
}

void allToAll(const Collective& c) {
  const auto sent = [&](int from, int to, size_t i) {
    return number(from, to * c.count + i, c.op);
  };
  Buffer in = blocks(c, [&](int to, size_t i) { return sent(c.rank, to, i); });
  Buffer out(in.size());
  run(c, [&](cudaStream_t stream) {
    return nccl().allToAll(in.data(), out.data(), c.count, c.type, c.comm, stream);
  });
  expect(
      out, blocks(c, [&](int from, size_t i) { return sent(from, c.rank, i); }), "all_to_all", c);
}

void gather(const Collective& c) {
  const size_t block = c.count * bytesOf(c.type);
  Buffer in = elements(c.type, c.count, [&](size_t i) { return number(c.rank, i, c.op); });
  const bool isRoot = c.rank == c.root;
  Buffer out(isRoot ? block * c.ranks : 0);
  const void* from = in.data();
  if (isRoot && c.inPlace && block != 0) {
    std::memcpy(out.data() + block * c.rank, in.data(), block);
    from = out.data() + block * c.rank;
  }
  run(c, [&](cudaStream_t stream) {
    return nccl().gather(
        from, isRoot ? out.data() : nullptr, c.count, c.type, c.root, c.comm, stream);
  });
  if (!isRoot) return;
  expect(out, blocks(c, [&](int rank, size_t i) { return number(rank, i, c.op); }), "gather", c);
}

void scatter(const Collective& c) {
  const size_t block = c.count * bytesOf(c.type);
  const bool isRoot = c.rank == c.root;
  Buffer in = elements(
      c.type, isRoot ? c.count * c.ranks : 0, [&](size_t i) { return number(c.root, i, c.op); });
  Buffer out(block);
  void* to = isRoot && c.inPlace ? in.data() + block * c.rank : out.data();
  run(c, [&](cudaStream_t stream) {
    return nccl().scatter(
        isRoot ? in.data() : nullptr, to, c.count, c.type, c.root, c.comm, stream);
  });
  if (isRoot && c.inPlace && block != 0) std::memcpy(out.data(), to, block);
  expect(
      out,
      elements(
          c.type, c.count, [&](size_t i) { return number(c.root, c.count * c.rank + i, c.op); }),
      "scatter", c);
}

void everything(Collective c) {
  for (const bool inPlace : {false, true}) {
    c.inPlace = inPlace;
    c.root = static_cast<int>(c.count % c.ranks);
    allReduce(c);
    reduce(c);
    reduceScatter(c);
    if (c.op != ncclSum) continue;
    allGather(c);
    broadcast(c);
    gather(c);
    scatter(c);
    if (!inPlace) allToAll(c);
  }
}

}  // namespace

TEST(valuesOfEveryTypeAndReduction) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    threadRanks(ranks, [&](ncclComm_t comm, int rank) {
      for (const ncclDataType_t type : kTypes) {
        for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
          for (const size_t count : {0, 1, 13, 1000})
            everything({ranks, rank, comm, type, op, count, 0, false});
        }
      }
    });
  }
}

// A sanitizer makes the library's loops slow. ThreadSanitizer looks for races, for which two and
// three ranks are enough, as on an emulated processor; AddressSanitizer for what lies outside of
// buffers of any length.
#if defined(__SANITIZE_THREAD__) || defined(EMULATED)
const std::vector<int> kLimitRanks = {2, 3};
const std::vector<ncclDataType_t> kLimitTypes = {ncclFloat64};
#elif defined(__SANITIZE_ADDRESS__)
const std::vector<int> kLimitRanks = {1, 2, 3, 4};
const std::vector<ncclDataType_t> kLimitTypes = {ncclUint8};
#else
const std::vector<int> kLimitRanks = {1, 2, 3, 4};
const std::vector<ncclDataType_t> kLimitTypes = {ncclUint8, ncclFloat64};
#endif

TEST_WITHIN(valuesAroundEveryLimitOfSize, 60) {
  for (const int ranks : kLimitRanks) {
    threadRanks(ranks, [&](ncclComm_t comm, int rank) {
      for (const ncclDataType_t type : kLimitTypes) {
        for (const size_t count : countsAroundLimits(ranks, bytesOf(type))) {
          everything({ranks, rank, comm, type, ncclSum, count, 0, false});
        }
      }
    });
  }
}

#ifdef __SANITIZE_THREAD__  // which sees no races between processes
const std::vector<size_t> kCountsOfProcesses = {1, 1000, 100'000};
#else
const std::vector<size_t> kCountsOfProcesses = {1, 1000, 100'000, 1'000'000};
#endif

TEST(valuesAmongProcesses) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    processRanks(ranks, [&](ncclComm_t comm, int rank) {
      for (const size_t count : kCountsOfProcesses) {
        everything({ranks, rank, comm, ncclFloat32, ncclSum, count, 0, false});
      }
    });
  }
}

TEST(manyRanksOnFewCpus) {
  threadRanks(9, [&](ncclComm_t comm, int rank) {
    for (const size_t count : {1, 1000, 100'000}) {
      everything({9, rank, comm, ncclFloat32, ncclSum, count, 0, false});
    }
  });
}

TEST(sumsAreTheSameBitsOnEveryRankAndInEveryRun) {
  for (const size_t count : {1000, 300'000}) {
    std::mutex mutex;
    std::vector<std::vector<float>> results;
    for (int run = 0; run < 2; ++run) {
      threadRanks(4, [&](ncclComm_t comm, int rank) {
        std::mt19937 random(rank);
        std::normal_distribution<float> normal(0, 100);
        std::vector<float> data(count);
        for (float& value : data) value = normal(random);
        CHECK_NCCL(
            nccl().allReduce(data.data(), data.data(), count, ncclFloat32, ncclSum, comm, nullptr));
        std::lock_guard lock(mutex);
        results.push_back(data);
      });
    }
    for (const auto& result : results) CHECK(result == results.front());
    // And these bits: the sum in the order of the ranks.
    std::vector<float> wanted(count);
    for (int rank = 0; rank < 4; ++rank) {
      std::mt19937 random(rank);
      std::normal_distribution<float> normal(0, 100);
      for (float& value : wanted) {
        const float next = normal(random);
        value = rank == 0 ? next : value + next;
      }
    }
    CHECK(results.front() == wanted);
  }
}

TEST(preMultipliedSumsTakeEachRanksScalar) {
  threadRanks(3, [](ncclComm_t comm, int rank) {
    for (const bool immediate : {true, false}) {
      double scalar = rank + 1;
      ncclRedOp_t op;
      CHECK_NCCL(
          nccl().redOpCreatePreMulSum(
              &op, &scalar, ncclFloat64, immediate ? ncclScalarHostImmediate : ncclScalarDevice,
              comm));
      if (immediate) scalar = 1000;
      for (const size_t count : {5, 200'000}) {
        std::vector<double> data(count, 1), out(count), blocks(count * 3, 1);
        CHECK_NCCL(
            nccl().allReduce(data.data(), out.data(), count, ncclFloat64, op, comm, nullptr));
        for (const double value : out) CHECK_EQUAL(value, 6);
        CHECK_NCCL(
            nccl().reduceScatter(blocks.data(), out.data(), count, ncclFloat64, op, comm, nullptr));
        for (const double value : out) CHECK_EQUAL(value, 6);
        CHECK_NCCL(
            nccl().reduce(data.data(), data.data(), count, ncclFloat64, op, 1, comm, nullptr));
        for (const double value : data) CHECK_EQUAL(value, rank == 1 ? 6 : 1);
      }
      float wrong = 0;
      CHECK_EQUAL(
          nccl().allReduce(&wrong, &wrong, 1, ncclFloat32, op, comm, nullptr), ncclInvalidArgument);
      CHECK_NCCL(nccl().redOpDestroy(op, comm));
      CHECK_EQUAL(nccl().redOpDestroy(op, comm), ncclInvalidArgument);
    }
  });
}
