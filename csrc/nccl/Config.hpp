// What a user sets of ncclConfig_t: field by field, each value checked.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Copies share their texts, so a copy that outlives the library's communicator keeps them for it.
class NcclConfig {
 public:
  struct Field {
    const char* name;    // as torch's NCCLConfig calls it
    const char* inNccl;  // as ncclConfig_t does
    int since;           // the first NCCL that has it, as ncclGetVersion tells
    int least;           // of a number, what NCCL accepts
    int most;
    int ncclConfig_t::* number;        // null: a text; or the header lacks the field
    const char* ncclConfig_t::* text;  // null: a number

    bool isText() const { return text != nullptr; }
  };

  // All that this project knows, whatever header it was built with.
  static const std::vector<Field>& fields();

  // None: NCCL's default. Raise std::invalid_argument for a value that NCCL would refuse, for a
  // field that the header lacks, and for a communicator that blocks.
  void setNumber(const Field& field, std::optional<int> value);
  void setText(const Field& field, const std::optional<std::string>& value);
  std::optional<int> number(const Field& field) const;
  std::optional<std::string> text(const Field& field) const;

  // Raises LibraryError where the library would ignore what is set, since it is older, and
  // std::invalid_argument where two values do not go together.
  void check(const NcclApi& api) const;

  // With this as the communicator's name, where the library takes one.
  NcclConfig named(const NcclApi& api, const std::string& name) const;

  // For the library. Communicators never block: deadlines and abort depend on it.
  ncclConfig_t raw(bool blocking) const;

 private:
  std::map<const Field*, int> numbers_;
  std::map<const Field*, std::shared_ptr<const std::string>> texts_;
};

}  // namespace torchcomms_pg
