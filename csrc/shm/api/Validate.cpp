#include "shm/api/Validate.hpp"

#include "shm/collective/Algorithms.hpp"

namespace torchcomms_pg::shm {

void invalidArgument(const char* operation, const std::string& text) {
  throw NcclError(ncclInvalidArgument, std::string(operation) + ": " + text);
}

void checkValue(
    const char* operation, const char* name, int64_t value, bool right, const char* wanted) {
  if (right) return;
  invalidArgument(
      operation, std::string(name) + " is " + std::to_string(value) + ", wanted " + wanted);
}

void checkRange(const char* operation, const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  const auto wanted = std::to_string(low) + " to " + std::to_string(high);
  checkValue(operation, name, value, false, wanted.c_str());
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
  if (type >= 0 && type < ncclNumTypes) return;
  const auto wanted = "an ncclDataType_t below " + std::to_string(ncclNumTypes);
  checkValue(operation, "datatype", type, false, wanted.c_str());
}

void checkRank(const char* operation, const char* name, int rank, int ranks) {
  if (rank >= 0 && rank < ranks) return;
  const auto wanted = "a rank from 0 to " + std::to_string(ranks - 1);
  checkValue(operation, name, rank, false, wanted.c_str());
}

void checkCount(const char* operation, size_t count, int ranks) {
  if (count > PTRDIFF_MAX / 8 / static_cast<size_t>(ranks)) {
    invalidArgument(operation, "count is " + std::to_string(count) + ", which no memory can hold");
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
  const int blocking = config->blocking;
  if (blocking == NCCL_CONFIG_UNDEF_INT) return inherited;
  checkValue(operation, "config.blocking", blocking, blocking == 0 || blocking == 1, "0 or 1");
  return blocking == 1;
}

void checkCollective(const Collective& c, const Comm& comm) {
  const char* operation = kindName(c.kind);
  checkType(operation, c.type);
  checkCount(operation, c.count, comm.size());
  if (hasRoot(c.kind)) checkRank(operation, "root", c.root, comm.size());
  const Shape shape = shapeOf(c.kind);
  const auto elements = [&](bool inParts) { return inParts ? c.count * comm.size() : c.count; };
  const bool isRoot = comm.rank() == c.root;
  if (isRoot || !shape.fromRoot) {
    checkBuffer(operation, "sendbuff", c.input, elements(shape.inputInParts));
  }
  if (isRoot || !shape.toRoot) {
    checkBuffer(operation, "recvbuff", c.output, elements(shape.outputInParts));
  }
}

}  // namespace torchcomms_pg::shm
