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

void checkHeader(const NcclConfig::Field& field) {
  if (field.number == nullptr && field.text == nullptr) {
    throw std::invalid_argument(
        std::string("config.") + field.name + " came with NCCL " + versionText(field.since) +
        ", and torchcomms_pg was built with nccl.h of " + versionText(NCCL_VERSION_CODE) +
        "; leave it None, or build with a newer nccl.h (TORCHCOMMS_PG_NCCL_INCLUDE)");
  }
}

// Returns the one copy of the text, which is never freed.
const std::string* kept(const std::string& text) {
  struct Kept {
    Mutex mutex;
    std::set<std::string> all GUARDED_BY(mutex);
  };
  static auto& texts = neverDestroyed<Kept>();
  const LockGuard lock(texts.mutex);
  return &*texts.all.insert(text).first;
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
#define TORCHCOMMS_PG_TEXT(name, field, since) \
  {name, #field, since, 0, 0, nullptr, TORCHCOMMS_PG_MEMBER(field, since)}

template <class Config>
std::vector<NcclConfig::Field> fieldsOf() {
  return {
      TORCHCOMMS_PG_NUMBER("blocking", blocking, 21800, 0, 1),
      TORCHCOMMS_PG_NUMBER("cga_cluster_size", cgaClusterSize, 21800, 0, 8),
      TORCHCOMMS_PG_NUMBER("min_ctas", minCTAs, 21800, 1, kMost),
      TORCHCOMMS_PG_NUMBER("max_ctas", maxCTAs, 21800, 1, kMost),
      TORCHCOMMS_PG_TEXT("net_name", netName, 21800),
      TORCHCOMMS_PG_NUMBER("split_share", splitShare, 21800, 0, 1),
      TORCHCOMMS_PG_NUMBER("traffic_class", trafficClass, 22602, 0, kMost),
      TORCHCOMMS_PG_TEXT("comm_name", commName, 22703),
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

void NcclConfig::setNumber(const Field& field, std::optional<int> value) {
  if (!value) {
    numbers_.erase(&field);
    return;
  }
  checkHeader(field);
  if (*value < field.least || *value > field.most) {
    throw std::invalid_argument(
        std::string("config.") + field.name + " is " + std::to_string(*value) + ", wanted " +
        field.range() + ", or None for NCCL's default");
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
  texts_[&field] = kept(*value);
}

std::optional<int> NcclConfig::number(const Field& field) const {
  const auto found = numbers_.find(&field);
  return found == numbers_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<std::string> NcclConfig::text(const Field& field) const {
  const auto found = texts_.find(&field);
  return found == texts_.end() ? std::nullopt : std::optional(*found->second);
}

NcclConfig NcclConfig::named(const Library& library, const std::string& name) const {
  const auto& all = fields();
  const auto& field = *std::find_if(all.begin(), all.end(), [](const auto& each) {
    return each.text == &ncclConfig_t::commName;
  });
  auto config = *this;
  if (library.version() >= field.since) {
    config.setText(field, name);
  }
  return config;
}

void NcclConfig::check(const Library& library) const {
  const int version = library.version();
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
  // The initializer stores nccl.h's version and struct size, which tell NCCL what fields to read.
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
