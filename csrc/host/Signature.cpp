#include "host/Signature.hpp"

#include "host/Names.hpp"

namespace torchcomms_pg::host {
namespace {

constexpr uint8_t kScaled = 7;  // a pre-multiplied sum, whose scalar may differ between ranks

bool reduces(CollectiveKind kind) {
  return kind == CollectiveKind::allReduce || kind == CollectiveKind::reduceScatter ||
         kind == CollectiveKind::reduce;
}

bool movesData(CollectiveKind kind) {
  return kind != CollectiveKind::split && kind != CollectiveKind::window &&
         kind != CollectiveKind::barrier;
}

}  // namespace

bool hasRoot(CollectiveKind kind) {
  return kind == CollectiveKind::broadcast || kind == CollectiveKind::reduce ||
         kind == CollectiveKind::gather || kind == CollectiveKind::scatter;
}

Signature signatureOf(const Collective& collective) {
  if (collective.whole != nullptr) return *collective.whole;
  uint8_t op = 0;
  if (reduces(collective.kind)) {
    op = collective.op.scaled ? kScaled : static_cast<uint8_t>(collective.op.reduction);
  }
  return Signature{
      .kind = static_cast<uint8_t>(collective.kind),
      .types = static_cast<uint8_t>(collective.type | op << 4),
      .root = static_cast<uint16_t>(hasRoot(collective.kind) ? collective.root : 0),
      .countLow = static_cast<uint32_t>(collective.count),
      .countHigh = static_cast<uint32_t>(collective.count >> 32),
  };
}

std::string describe(const Signature& signature) {
  const auto kind = static_cast<CollectiveKind>(signature.kind);
  if (!movesData(kind)) return kindName(kind);
  const uint64_t count = uint64_t{signature.countHigh} << 32 | signature.countLow;
  std::string text = std::string(kindName(kind)) + "(count=" + std::to_string(count) + ", " +
                     typeName(static_cast<ncclDataType_t>(signature.types & 15));
  if (reduces(kind)) {
    const int op = signature.types >> 4;
    text += std::string(", ") + (op == kScaled ? "pre-multiplied sum" : reductionName(op));
  }
  if (hasRoot(kind)) text += ", root=" + std::to_string(signature.root);
  return text + ")";
}

}  // namespace torchcomms_pg::host
