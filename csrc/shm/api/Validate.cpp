#include "shm/api/Validate.hpp"

#include <cstdint>

#include "shm/Host.hpp"

namespace torchcomms_pg::shm {

void invalidArgument(const char* operation, const std::string& text) {
  throw NcclError(ncclInvalidArgument, std::string(operation) + ": " + text);
}

void checkPointer(const char* operation, const char* name, const void* pointer) {
  if (pointer == nullptr) invalidArgument(operation, std::string(name) + " is null");
}

void checkBuffer(const char* operation, const char* name, const void* buffer, size_t elements) {
  if (buffer == nullptr && elements != 0) {
    invalidArgument(
        operation, std::string(name) + " is null, wanted a buffer of " + std::to_string(elements) +
                       " elements");
  }
}

void checkType(const char* operation, ncclDataType_t type) {
  if (type < 0 || type >= ncclNumTypes) {
    invalidArgument(
        operation, "datatype is " + std::to_string(type) + ", wanted an ncclDataType_t below " +
                       std::to_string(ncclNumTypes));
  }
}

void checkRank(const char* operation, const char* name, int rank, int ranks) {
  if (rank < 0 || rank >= ranks) {
    invalidArgument(
        operation, std::string(name) + " is " + std::to_string(rank) +
                       ", wanted a rank from 0 to " + std::to_string(ranks - 1));
  }
}

bool checkConfig(const char* operation, const ncclConfig_t* config, bool inherited) {
  if (config == nullptr) return inherited;
  // The value of NCCL_API_MAGIC, which nccl.h defines since NCCL 2.29.
  constexpr unsigned kConfigMagic = 0xcafebeef;
  // The caller's nccl.h may be older: only fields within `config->size` may be read.
  constexpr size_t kLeast = offsetof(ncclConfig_t, blocking) + sizeof config->blocking;
  if (config->magic != kConfigMagic || config->size < kLeast) {
    invalidArgument(operation, "config was not made with NCCL_CONFIG_INITIALIZER");
  }
  if (config->blocking == NCCL_CONFIG_UNDEF_INT) return inherited;
  if (config->blocking != 0 && config->blocking != 1) {
    invalidArgument(
        operation, "config.blocking is " + std::to_string(config->blocking) + ", wanted 0 or 1");
  }
  return config->blocking == 1;
}

void checkCollective(const Collective& c, const Comm& comm) {
  const char* operation = kindName(c.kind);
  checkType(operation, c.type);
  const auto ranks = static_cast<size_t>(comm.size());
  if (c.count > PTRDIFF_MAX / 8 / ranks) {
    invalidArgument(
        operation, "count is " + std::to_string(c.count) + ", which no memory can hold");
  }
  bool rooted = true;
  size_t inputs = c.count, outputs = c.count;
  bool readsInput = true, writesOutput = true;
  const bool isRoot = comm.rank() == c.root;
  switch (c.kind) {
    case CollectiveKind::allReduce: rooted = false; break;
    case CollectiveKind::reduceScatter: rooted = false, inputs *= ranks; break;
    case CollectiveKind::allGather: rooted = false, outputs *= ranks; break;
    case CollectiveKind::allToAll: rooted = false, inputs *= ranks, outputs *= ranks; break;
    case CollectiveKind::broadcast: readsInput = isRoot; break;
    case CollectiveKind::reduce: writesOutput = isRoot; break;
    case CollectiveKind::gather: writesOutput = isRoot, outputs *= ranks; break;
    case CollectiveKind::scatter: readsInput = isRoot, inputs *= ranks; break;
    case CollectiveKind::split:
    case CollectiveKind::window:
    case CollectiveKind::barrier: rooted = false; break;
  }
  if (rooted) checkRank(operation, "root", c.root, comm.size());
  if (readsInput) checkBuffer(operation, "sendbuff", c.input, inputs);
  if (writesOutput) checkBuffer(operation, "recvbuff", c.output, outputs);
}

}  // namespace torchcomms_pg::shm
