#include "monitor/RankStatus.hpp"

#include "monitor/Fields.hpp"

namespace torchcomms_pg {

std::string encode(const RankStatus& status) {
  return fields::write(status);
}

std::optional<RankStatus> decodeStatus(const std::string& text) {
  return fields::read<RankStatus>(text);
}

}  // namespace torchcomms_pg
