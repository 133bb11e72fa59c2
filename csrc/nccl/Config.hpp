// The fields of ncclConfig_t that a user sets, each value checked.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// Texts stay until the process ends: NCCL keeps the pointer to commName (src/init.cc,
// parseCommConfig), and a communicator that is left behind outlives everything here.
class NcclConfig {
 public:
  struct Field {
    const char* name;    // name in torch's NCCLConfig
    const char* inNccl;  // name in ncclConfig_t
    int since;           // version of the first NCCL that has it, as ncclGetVersion tells
    int least;           // lower limit of a number that NCCL accepts
    int most;
    int ncclConfig_t::* number;        // null: a text; or the header lacks the field
    const char* ncclConfig_t::* text;  // null: a number

    bool isText() const { return text != nullptr; }
    std::string range() const;  // returns the values that NCCL accepts, in words
  };

  // Returns all fields that this project knows, whatever header it was built with.
  static const std::vector<Field>& fields();

  // Set a value; none: NCCL's default. Raise std::invalid_argument for a value that NCCL would
  // refuse, for a field that the header lacks, and for a communicator that blocks.
  void setNumber(const Field& field, std::optional<int> value);
  void setText(const Field& field, const std::optional<std::string>& value);
  std::optional<int> number(const Field& field) const;
  std::optional<std::string> text(const Field& field) const;

  // Raises LibraryError if the library is too old and would ignore what is set, and
  // std::invalid_argument if two values do not go together.
  void check(const NcclApi& api) const;

  // Returns a copy with this name for the communicator, if the library takes one.
  NcclConfig named(const NcclApi& api, const std::string& name) const;

  // Returns the library's struct. Communicators never block: deadlines and abort depend on it.
  ncclConfig_t raw(bool blocking) const;

 private:
  std::map<const Field*, int> numbers_;
  std::map<const Field*, const std::string*> texts_;
};

}  // namespace torchcomms_pg
