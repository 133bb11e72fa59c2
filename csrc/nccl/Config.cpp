#include "nccl/Config.hpp"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string_view>

#include "nccl/Library.hpp"

namespace torchcomms_pg {

namespace {

// A field that the header may lack.
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 2)
#define TORCHCOMMS_PG_FROM_2_29_2(field) &ncclConfig_t::field
#else
#define TORCHCOMMS_PG_FROM_2_29_2(field) nullptr
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 3)
#define TORCHCOMMS_PG_FROM_2_30_3(field) &ncclConfig_t::field
#else
#define TORCHCOMMS_PG_FROM_2_30_3(field) nullptr
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 30, 7)
#define TORCHCOMMS_PG_FROM_2_30_7(field) &ncclConfig_t::field
#else
#define TORCHCOMMS_PG_FROM_2_30_7(field) nullptr
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 31, 2)
#define TORCHCOMMS_PG_FROM_2_31_2(field) &ncclConfig_t::field
#else
#define TORCHCOMMS_PG_FROM_2_31_2(field) nullptr
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 32, 3)
#define TORCHCOMMS_PG_FROM_2_32_3(field) &ncclConfig_t::field
#else
#define TORCHCOMMS_PG_FROM_2_32_3(field) nullptr
#endif

constexpr int kMost = INT_MAX;
constexpr int kChannels = 64;  // NCCL's MAXCHANNELS

using Config = ncclConfig_t;

std::string wanted(const NcclConfig::Field& field) {
  if (field.most == kMost) {
    return std::to_string(field.least) + " or more";
  }
  return std::to_string(field.least) + (field.most == field.least + 1 ? " or " : " to ") +
         std::to_string(field.most);
}

void checkHeader(const NcclConfig::Field& field) {
  if (field.number == nullptr && field.text == nullptr) {
    throw std::invalid_argument(
        std::string("config.") + field.name + " came with NCCL " + versionText(field.since) +
        ", and torchcomms_pg was built with nccl.h of " + versionText(NCCL_VERSION_CODE) +
        "; leave it None, or build with a newer nccl.h (TORCHCOMMS_PG_NCCL_INCLUDE)");
  }
}

}  // namespace

const std::vector<NcclConfig::Field>& NcclConfig::fields() {
  static const std::vector<Field> all = {
      {"blocking", "blocking", 21800, 0, 1, &Config::blocking, nullptr},
      {"cga_cluster_size", "cgaClusterSize", 21800, 0, 8, &Config::cgaClusterSize, nullptr},
      {"min_ctas", "minCTAs", 21800, 1, kMost, &Config::minCTAs, nullptr},
      {"max_ctas", "maxCTAs", 21800, 1, kMost, &Config::maxCTAs, nullptr},
      {"net_name", "netName", 21800, 0, 0, nullptr, &Config::netName},
      {"split_share", "splitShare", 21800, 0, 1, &Config::splitShare, nullptr},
      {"traffic_class", "trafficClass", 22602, 0, kMost, &Config::trafficClass, nullptr},
      {"comm_name", "commName", 22703, 0, 0, nullptr, &Config::commName},
      {"collnet_enable", "collnetEnable", 22703, 0, 1, &Config::collnetEnable, nullptr},
      {"cta_policy", "CTAPolicy", 22703, 0, kMost, &Config::CTAPolicy, nullptr},
      {"shrink_share", "shrinkShare", 22703, 0, 1, &Config::shrinkShare, nullptr},
      {"nvls_ctas", "nvlsCTAs", 22703, 1, kMost, &Config::nvlsCTAs, nullptr},
      {"n_channels_per_net_peer",
       "nChannelsPerNetPeer",
       22803,
       1,
       kChannels,
       &Config::nChannelsPerNetPeer,
       nullptr},
      {"nvlink_centric_sched",
       "nvlinkCentricSched",
       22803,
       0,
       1,
       &Config::nvlinkCentricSched,
       nullptr},
      {"graph_usage_mode",
       "graphUsageMode",
       22902,
       0,
       2,
       TORCHCOMMS_PG_FROM_2_29_2(graphUsageMode),
       nullptr},
      {"num_rma_ctx", "numRmaCtx", 22902, 0, kMost, TORCHCOMMS_PG_FROM_2_29_2(numRmaCtx), nullptr},
      {"max_p2p_peers",
       "maxP2pPeers",
       23003,
       1,
       kMost,
       TORCHCOMMS_PG_FROM_2_30_3(maxP2pPeers),
       nullptr},
      {"graph_stream_ordering",
       "graphStreamOrdering",
       23007,
       0,
       1,
       TORCHCOMMS_PG_FROM_2_30_7(graphStreamOrdering),
       nullptr},
      {"launch_order_implicit",
       "launchOrderImplicit",
       23102,
       0,
       kMost,
       TORCHCOMMS_PG_FROM_2_31_2(launchOrderImplicit),
       nullptr},
      {"num_rma_sig", "numRmaSig", 23102, 0, kMost, TORCHCOMMS_PG_FROM_2_31_2(numRmaSig), nullptr},
      {"rma_eager_init",
       "rmaEagerInit",
       23102,
       0,
       kMost,
       TORCHCOMMS_PG_FROM_2_31_2(rmaEagerInit),
       nullptr},
      {"host_cft_mode",
       "hostCftMode",
       23102,
       0,
       kMost,
       TORCHCOMMS_PG_FROM_2_31_2(hostCftMode),
       nullptr},
      {"nvls_host_mode",
       "nvlsHostMode",
       23203,
       0,
       kMost,
       TORCHCOMMS_PG_FROM_2_32_3(nvlsHostMode),
       nullptr},
  };
  return all;
}

void NcclConfig::setNumber(const Field& field, std::optional<int> value) {
  if (!value) {
    numbers_.erase(&field);
    return;
  }
  checkHeader(field);
  if (*value < field.least || *value > field.most) {
    throw std::invalid_argument(
        std::string("config.") + field.name + " is " + std::to_string(*value) + ", wanted " +
        wanted(field) + ", or None for NCCL's default");
  }
  numbers_[&field] = *value;
}

void NcclConfig::setText(const Field& field, const std::optional<std::string>& value) {
  if (!value) {
    texts_.erase(&field);
    return;
  }
  if (value->empty() || value->find('\0') != std::string::npos) {
    throw std::invalid_argument(
        std::string("config.") + field.name +
        " is empty or has a zero byte, wanted a name, or None for NCCL's default");
  }
  texts_[&field] = std::make_shared<const std::string>(*value);
}

std::optional<int> NcclConfig::number(const Field& field) const {
  const auto found = numbers_.find(&field);
  return found == numbers_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::string> NcclConfig::text(const Field& field) const {
  const auto found = texts_.find(&field);
  return found == texts_.end() ? std::nullopt : std::optional(*found->second);
}

NcclConfig NcclConfig::named(const NcclApi& api, const std::string& name) const {
  const auto& all = fields();
  const auto& field = *std::find_if(
      all.begin(), all.end(), [](const auto& each) { return each.text == &Config::commName; });
  auto config = *this;
  int version = 0;
  if (api.getVersion(&version) == ncclSuccess && version >= field.since) {
    config.setText(field, name);
  }
  return config;
}

void NcclConfig::check(const NcclApi& api) const {
  int version = 0;
  if (api.getVersion(&version) != ncclSuccess) {
    return;  // such a library fails at once
  }
  for (const auto& field : fields()) {
    if (field.since > version && (numbers_.count(&field) > 0 || texts_.count(&field) > 0)) {
      throw LibraryError(
          std::string("config.") + field.name + " came with NCCL " + versionText(field.since) +
          ", and the loaded library is " + versionText(version) +
          ", which would ignore it; leave it None, or load a newer one (TORCHCOMM_NCCL_LIBRARY)");
    }
  }
  const auto config = raw(/*blocking=*/true);
  const bool least = config.minCTAs != NCCL_CONFIG_UNDEF_INT;
  const bool most = config.maxCTAs != NCCL_CONFIG_UNDEF_INT;
  if (least && (!most || config.minCTAs > config.maxCTAs)) {
    throw std::invalid_argument(
        "config.min_ctas is " + std::to_string(config.minCTAs) + " and config.max_ctas " +
        (most ? std::to_string(config.maxCTAs) : "None") +
        ": NCCL takes min_ctas only together with a max_ctas that is not less; set both");
  }
}

ncclConfig_t NcclConfig::raw(bool blocking) const {
  // Has the header's layout and version: NCCL reads as much of it as it knows.
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  for (const auto& [field, value] : numbers_) {
    config.*field->number = value;
  }
  for (const auto& [field, value] : texts_) {
    config.*field->text = value->c_str();
  }
  config.blocking = blocking ? 1 : 0;
  return config;
}

}  // namespace torchcomms_pg
