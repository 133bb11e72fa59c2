#include "nccl/Config.hpp"

#include <algorithm>
#include <climits>
#include <set>
#include <stdexcept>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"

namespace torchcomms_pg {

namespace {

constexpr int kMost = INT_MAX;
constexpr int kChannels = 64;  // NCCL's MAXCHANNELS

// Returns the one copy of the text, which is never freed.
const char* kept(const std::string& text) {
  struct Kept {
    Mutex mutex;
    std::set<std::string> all GUARDED_BY(mutex);
  };
  static auto& texts = neverDestroyed<Kept>();
  const LockGuard lock(texts.mutex);
  return texts.all.insert(text).first->c_str();
}

// Yields the pointer to a member of Config, or null if nccl.h is too old to have it. Config must be
// a template parameter: only then may the discarded branch name a member that does not exist.
#define TORCHCOMMS_PG_MEMBER(field, since)        \
  [] {                                            \
    if constexpr (NCCL_VERSION_CODE >= (since)) { \
      return &Config::field;                      \
    } else {                                      \
      return nullptr;                             \
    }                                             \
  }()
#define TORCHCOMMS_PG_NUMBER(name, field, since, least, most) \
  {name, #field, since, least, most, TORCHCOMMS_PG_MEMBER(field, since), nullptr}

template <class Config>
std::vector<NcclConfig::Field> fieldsOf() {
  return {
      TORCHCOMMS_PG_NUMBER("blocking", blocking, 21800, 0, 1),
      TORCHCOMMS_PG_NUMBER("cga_cluster_size", cgaClusterSize, 21800, 0, 8),
      TORCHCOMMS_PG_NUMBER("min_ctas", minCTAs, 21800, 1, kMost),
      TORCHCOMMS_PG_NUMBER("max_ctas", maxCTAs, 21800, 1, kMost),
      {"net_name", "netName", 21800, 0, 0, nullptr, &Config::netName},
      TORCHCOMMS_PG_NUMBER("split_share", splitShare, 21800, 0, 1),
      TORCHCOMMS_PG_NUMBER("traffic_class", trafficClass, 22602, 0, kMost),
      {"comm_name", "commName", 22703, 0, 0, nullptr, &Config::commName},
      TORCHCOMMS_PG_NUMBER("collnet_enable", collnetEnable, 22703, 0, 1),
      TORCHCOMMS_PG_NUMBER("cta_policy", CTAPolicy, 22703, 0, kMost),
      TORCHCOMMS_PG_NUMBER("shrink_share", shrinkShare, 22703, 0, 1),
      TORCHCOMMS_PG_NUMBER("nvls_ctas", nvlsCTAs, 22703, 1, kMost),
      TORCHCOMMS_PG_NUMBER("n_channels_per_net_peer", nChannelsPerNetPeer, 22803, 1, kChannels),
      TORCHCOMMS_PG_NUMBER("nvlink_centric_sched", nvlinkCentricSched, 22803, 0, 1),
      TORCHCOMMS_PG_NUMBER("graph_usage_mode", graphUsageMode, 22902, 0, 2),
      TORCHCOMMS_PG_NUMBER("num_rma_ctx", numRmaCtx, 22902, 0, kMost),
      TORCHCOMMS_PG_NUMBER("max_p2p_peers", maxP2pPeers, 23003, 1, kMost),
      TORCHCOMMS_PG_NUMBER("graph_stream_ordering", graphStreamOrdering, 23007, 0, 1),
      TORCHCOMMS_PG_NUMBER("launch_order_implicit", launchOrderImplicit, 23102, 0, kMost),
      TORCHCOMMS_PG_NUMBER("num_rma_sig", numRmaSig, 23102, 0, kMost),
      TORCHCOMMS_PG_NUMBER("rma_eager_init", rmaEagerInit, 23102, 0, kMost),
      TORCHCOMMS_PG_NUMBER("host_cft_mode", hostCftMode, 23102, 0, kMost),
      TORCHCOMMS_PG_NUMBER("nvls_host_mode", nvlsHostMode, 23203, 0, kMost),
  };
}

}  // namespace

std::string NcclConfig::Field::range() const {
  if (isText()) {
    return "a name";
  }
  if (most == kMost) {
    return std::to_string(least) + " or more";
  }
  return std::to_string(least) + (most == least + 1 ? " or " : " to ") + std::to_string(most);
}

const std::vector<NcclConfig::Field>& NcclConfig::fields() {
  // Never destroyed: threads that make communicators may read them while the process exits.
  static const auto* const all = &neverDestroyed<std::vector<Field>>(fieldsOf<ncclConfig_t>());
  return *all;
}

void NcclConfig::set(const Field& field, const std::optional<Value>& value) {
  const auto name = std::string("config.") + field.name;
  if (!value) {
    values_.erase(&field);
    return;
  }
  if (field.isText()) {
    const auto& text = std::get<std::string>(*value);
    if (text.empty() || text.find('\0') != std::string::npos) {
      throw std::invalid_argument(
          name + " is empty or has a zero byte, wanted a name, or None for NCCL's default");
    }
  } else if (field.number == nullptr) {
    throw std::invalid_argument(
        name + " came with NCCL " + versionText(field.since) +
        ", and torchcomms_pg was built with nccl.h of " + versionText(NCCL_VERSION_CODE) +
        "; leave it None, or build with a newer nccl.h (TORCHCOMMS_PG_NCCL_INCLUDE)");
  } else if (
      const int number = std::get<int>(*value); number < field.least || number > field.most) {
    throw std::invalid_argument(
        name + " is " + std::to_string(number) + ", wanted " + field.range() +
        ", or None for NCCL's default");
  }
  values_[&field] = *value;
}

std::optional<NcclConfig::Value> NcclConfig::value(const Field& field) const {
  const auto found = values_.find(&field);
  return found == values_.end() ? std::nullopt : std::optional(found->second);
}

NcclConfig NcclConfig::named(const Library& library, const std::string& name) const {
  const auto& field = *std::ranges::find(fields(), &ncclConfig_t::commName, &Field::text);
  auto config = *this;
  if (library.version() >= field.since) {
    config.set(field, name);
  }
  return config;
}

void NcclConfig::check(const Library& library) const {
  const int version = library.version();
  for (const auto& field : fields()) {
    if (field.since > version && values_.contains(&field)) {
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
  // The initializer stores nccl.h's version and struct size, which tell NCCL what fields to read.
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  for (const auto& [field, value] : values_) {
    if (field->isText()) {
      config.*field->text = kept(std::get<std::string>(value));
    } else {
      config.*field->number = std::get<int>(value);
    }
  }
  config.blocking = blocking ? 1 : 0;
  return config;
}

}  // namespace torchcomms_pg
