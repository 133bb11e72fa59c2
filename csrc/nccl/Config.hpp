// The fields of ncclConfig_t that a user sets, with checks of each value.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "nccl/Library.hpp"

namespace torchcomms_pg {

// A user's settings for one communicator.
class NcclConfig {
 public:
  struct Field {
    const char* name;    // name in torch's NCCLConfig
    const char* inNccl;  // name in ncclConfig_t
    int since;           // first version with the field, as ncclGetVersion reports it
    int least;           // lower limit of a number that NCCL accepts
    int most;
    int ncclConfig_t::* number;        // null for a text, or if nccl.h lacks the field
    const char* ncclConfig_t::* text;  // null for a number

    bool isText() const { return text != nullptr; }
    std::string range() const;  // returns the values that NCCL accepts, in words
  };

  // Returns all fields that this project knows, also those that nccl.h lacked at the build.
  static const std::vector<Field>& fields();

  using Value = std::variant<int, std::string>;
  // Sets a value, a string if the field is a text; nullopt restores NCCL's default. Raises
  // std::invalid_argument for a value that NCCL would refuse, and for a field that nccl.h lacks.
  void set(const Field& field, const std::optional<Value>& value);
  std::optional<Value> value(const Field& field) const;

  // Raises LibraryError if the library is too old and would ignore a value, and
  // std::invalid_argument if two values contradict each other.
  void check(const Library& library) const;

  // Returns a copy in which the communicator's name is `name`, if the library supports names.
  NcclConfig named(const Library& library, const std::string& name) const;

  // Returns NCCL's struct. `blocking` replaces the user's setting. The texts are never freed: NCCL
  // keeps the pointer to commName (src/init.cc, parseCommConfig), and an abandoned communicator may
  // outlive this object.
  ncclConfig_t raw(bool blocking) const;

 private:
  std::map<const Field*, Value> values_;
};

}  // namespace torchcomms_pg
