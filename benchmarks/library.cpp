// The shared-memory library alone, through its functions, without torch and Python:
//
//   library SECONDS RANKS OPERATION:BYTES...
//
// BYTES are those of the larger buffer of a rank. Prints one line of JSON for each operation; a
// call counts as its slowest rank. Results are checked.
#include <cstdint>
#include <string>

#include "processes.hpp"
#include "shm/api/Api.hpp"

using namespace bench;

namespace {

constexpr int kFewestCalls = 5, kMostCalls = 20'000;

const torchcomms_pg::NcclApi& nccl() {
  return torchcomms_pg::shm::ncclFunctions();
}

void check(ncclResult_t result) {
  if (result != ncclSuccess) stop(nccl().getLastError(nullptr));
}

struct Case {
  std::string op;
  size_t bytes;
};

struct Shared {
  Meeting meeting;
  std::atomic<int> calls;
};

class Rank {
 public:
  Rank(ncclComm_t comm, int rank, int ranks, const Case& c)
      : comm_(comm), rank_(rank), ranks_(ranks), op_(c.op) {
    count_ = std::max<size_t>(1, c.bytes / sizeof(float));
    if (op_ != "all_reduce" && op_ != "broadcast" && op_ != "reduce" && op_ != "send_recv") {
      count_ = (count_ + ranks - 1) / ranks * ranks;
    }
    block_ = std::max<size_t>(1, count_ / ranks);
    in_.assign(count_, rank + 1.0f);
    out_.assign(count_, -1.0f);
  }

  void call() {
    float *in = in_.data(), *out = out_.data();
    if (op_ == "all_reduce") {
      check(nccl().allReduce(in, out, count_, ncclFloat32, ncclSum, comm_, nullptr));
    } else if (op_ == "broadcast") {
      check(nccl().broadcast(in, out, count_, ncclFloat32, 0, comm_, nullptr));
    } else if (op_ == "all_gather") {
      check(nccl().allGather(in, out, block_, ncclFloat32, comm_, nullptr));
    } else if (op_ == "reduce_scatter") {
      check(nccl().reduceScatter(in, out, block_, ncclFloat32, ncclSum, comm_, nullptr));
    } else if (op_ == "all_to_all") {
      check(nccl().allToAll(in, out, block_, ncclFloat32, comm_, nullptr));
    } else if (op_ == "reduce") {
      check(nccl().reduce(in, out, count_, ncclFloat32, ncclSum, 0, comm_, nullptr));
    } else if (op_ == "gather") {
      check(nccl().gather(in, out, block_, ncclFloat32, 0, comm_, nullptr));
    } else if (op_ == "scatter") {
      check(nccl().scatter(in, out, block_, ncclFloat32, 0, comm_, nullptr));
    } else if (op_ == "send_recv") {
      const int peer = rank_ ^ 1;
      if (peer >= ranks_) return;
      if (rank_ < peer) check(nccl().send(in, count_, ncclFloat32, peer, comm_, nullptr));
      check(nccl().recv(out, count_, ncclFloat32, peer, comm_, nullptr));
      if (rank_ > peer) check(nccl().send(in, count_, ncclFloat32, peer, comm_, nullptr));
    } else {
      stop(("no such operation: " + op_).c_str());
    }
  }

  void checkResult() const {
    const float sum = ranks_ * (ranks_ + 1) / 2.0f;
    for (size_t i = 0; i < count_; ++i) {
      const float owner = i / block_ + 1.0f;  // of a block
      const float wanted = op_ == "all_reduce"                          ? sum
                           : op_ == "broadcast"                         ? 1.0f
                           : op_ == "all_gather" || op_ == "all_to_all" ? owner
                           : op_ == "reduce_scatter"                    ? (i < block_ ? sum : -1.0f)
                           : op_ == "scatter"     ? (i < block_ ? 1.0f : -1.0f)
                           : op_ == "reduce"      ? (rank_ == 0 ? sum : out_[i])
                           : op_ == "gather"      ? (rank_ == 0 ? owner : -1.0f)
                           : (rank_ ^ 1) < ranks_ ? (rank_ ^ 1) + 1.0f
                                                  : -1.0f;
      if (out_[i] != wanted) stop(("wrong result of " + op_).c_str());
    }
  }

  // Whether no rank can be a call ahead of another.
  bool meets() const {
    return op_ == "all_reduce" || op_ == "all_gather" || op_ == "reduce_scatter" ||
           op_ == "all_to_all" || op_ == "send_recv";
  }

 private:
  ncclComm_t comm_;
  int rank_, ranks_;
  std::string op_;
  size_t count_ = 0, block_ = 0;
  std::vector<float> in_, out_;
};

void measure(
    ncclComm_t comm, int rank, int ranks, const Case& c, double seconds, Shared& common,
    double* times) {
  Rank subject(comm, rank, ranks, c);
  common.meeting.meet(ranks);
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const double start = now();
    subject.call();
    best = std::min(best, now() - start);
  }
  subject.checkResult();
  if (rank == 0)
    common.calls = std::clamp(static_cast<int>(seconds / best), kFewestCalls, kMostCalls);
  common.meeting.meet(ranks);
  const int calls = common.calls;
  const bool meet = !subject.meets();
  for (int i = 0; i < calls; ++i) {
    if (meet) common.meeting.meet(ranks);
    const double start = now();
    subject.call();
    times[static_cast<size_t>(rank) * kMostCalls + i] = now() - start;
  }
  subject.checkResult();
  common.meeting.meet(ranks);
  if (rank != 0) return;
  const double half = c.op == "send_recv" ? 0.5 : 1;  // there and back
  std::vector<double> slowest(calls);
  for (int i = 0; i < calls; ++i) {
    for (int r = 0; r < ranks; ++r) {
      slowest[i] = std::max(slowest[i], times[static_cast<size_t>(r) * kMostCalls + i] * half);
    }
  }
  std::printf(
      "{\"op\": \"%s\", \"bytes\": %zu, \"ranks\": %d, \"median_us\": %.3f, \"p99_us\": %.3f, "
      "\"calls\": %d}\n",
      c.op.c_str(), c.bytes, ranks, quantile(slowest, 0.5) * 1e6, quantile(slowest, 0.99) * 1e6,
      calls);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) stop("usage: library SECONDS RANKS OPERATION:BYTES...");
  const double seconds = std::stod(arguments[1]);
  const int ranks = std::stoi(arguments[2]);
  std::vector<Case> cases;
  for (int i = 3; i < count; ++i) {
    const std::string text = arguments[i];
    const size_t colon = text.find(':');
    if (colon == std::string::npos) stop("an operation has the form all_reduce:1024");
    cases.push_back({text.substr(0, colon), std::stoull(text.substr(colon + 1))});
  }
  Shared* common = shared<Shared>(1);
  double* times = shared<double>(static_cast<size_t>(ranks) * kMostCalls);
  ncclUniqueId id;
  check(nccl().getUniqueId(&id));
  processes(ranks, [&](int rank) {
    ncclComm_t comm = nullptr;
    check(nccl().commInitRankConfig(&comm, ranks, id, rank, nullptr));
    for (const Case& c : cases) measure(comm, rank, ranks, c, seconds, *common, times);
    check(nccl().commDestroy(comm));
  });
}
