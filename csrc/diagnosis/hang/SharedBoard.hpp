// The key-value store through which the ranks of a group exchange the texts of their diagnoses.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace torchcomms_pg {

// All ranks of a group, and no others, can read and write it. Calls may block, and raise
// std::exception. Used by one thread.
class SharedBoard {
 public:
  virtual ~SharedBoard() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;
  // Writes `value` if `key` has none. Returns whether the key's value is `value` afterwards.
  virtual bool claim(const std::string& key, const std::string& value) = 0;
  virtual int64_t add(const std::string& key, int64_t value) = 0;
};

}  // namespace torchcomms_pg
