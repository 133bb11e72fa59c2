#include "diagnosis/rank/RankStatus.hpp"

#include "diagnosis/rank/Fields.hpp"

namespace torchcomms_pg {

bool isSameOperation(const Wait& one, const Wait& other) {
  if (one.group != other.group || one.collectives.empty() != other.collectives.empty()) {
    return false;
  }
  return one.collectives.empty() ? one.messages == other.messages
                                 : one.collectives.back().seq == other.collectives.back().seq;
}

std::string encode(const RankStatus& status) {
  return fields::write(status);
}

std::optional<RankStatus> decodeStatus(const std::string& text) {
  return fields::read<RankStatus>(text);
}

}  // namespace torchcomms_pg
