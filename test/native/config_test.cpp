// NCCL's configuration, as the library gets it.
#include <cstring>

#include "Check.hpp"
#include "nccl/Config.hpp"

using torchcomms_pg::NcclConfig;

namespace {

const NcclConfig::Field& field(const char* name) {
  for (const auto& each : NcclConfig::fields()) {
    if (std::strcmp(each.name, name) == 0) return each;
  }
  throw std::runtime_error(name);
}

}  // namespace

TEST(whatIsNotSetIsLeftToTheLibrary) {
  const ncclConfig_t untouched = NCCL_CONFIG_INITIALIZER;
  const auto raw = NcclConfig().raw(/*blocking=*/true);
  CHECK_EQUAL(raw.size, sizeof(ncclConfig_t));
  CHECK_EQUAL(raw.version, static_cast<unsigned>(NCCL_VERSION_CODE));
  CHECK_EQUAL(raw.blocking, 1);
  CHECK_EQUAL(NcclConfig().raw(/*blocking=*/false).blocking, 0);
  for (const auto& each : NcclConfig::fields()) {
    if (each.isText()) CHECK(raw.*each.text == nullptr);
    if (each.number != nullptr && std::strcmp(each.name, "blocking") != 0) {
      CHECK_EQUAL(raw.*each.number, untouched.*each.number);
    }
  }
}

TEST(everyFieldReachesItsPlace) {
  NcclConfig config;
  for (const auto& each : NcclConfig::fields()) {
    if (each.number != nullptr) config.set(each, each.least);
    if (each.isText()) config.set(each, each.inNccl);
  }
  const auto raw = config.raw(true);
  for (const auto& each : NcclConfig::fields()) {
    // No user chooses whether it blocks.
    const bool chosen = each.number != nullptr && std::strcmp(each.name, "blocking") != 0;
    if (chosen) CHECK_EQUAL(raw.*each.number, each.least);
    if (each.isText()) CHECK_EQUAL(std::string(raw.*each.text), std::string(each.inNccl));
  }
}

TEST(theTextsThatTheLibraryWasGivenStayWhenTheConfigurationHasGone) {
  const std::string name = "a name that is too long to be kept in the string itself";
  ncclConfig_t raw;
  {
    NcclConfig config;
    config.set(field("comm_name"), name);
    raw = config.raw(true);
    config.set(field("comm_name"), std::string(name.size(), '-'));
  }
  const std::vector<std::string> more(100, std::string(name.size(), '+'));  // takes freed memory
  CHECK_EQUAL(std::string(raw.commName), name);
}
