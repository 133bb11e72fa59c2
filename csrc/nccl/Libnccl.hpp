// libnccl, loaded at run time.
#pragma once

#include <string>
#include <vector>

#include "nccl/Library.hpp"

namespace torchcomms_pg {

// File name of the library that this build of torch uses. ROCm's RCCL has NCCL's API and version
// numbers.
#ifdef TORCHCOMMS_PG_ROCM
inline constexpr const char* kNcclSoname = "librccl.so.1";
#else
inline constexpr const char* kNcclSoname = "libnccl.so.2";
#endif

// Places in which to look for libnccl.
struct LibrarySearch {
  std::string path;    // file chosen by the user; if set, the rest is ignored
  std::string folder;  // folder of the installed NCCL package; empty if none
  std::string soname = kNcclSoname;
};

// One loaded libnccl, which is never unloaded. All functions come from the same handle, so that
// functions of two copies never mix.
class Libnccl final : public Library {
 public:
  // Loads the chosen path, or if none is set the first of these that can be loaded: the file that
  // the process has mapped, which is usually torch's; the file of the package; the file that the
  // system's loader finds. Raises LibraryError if none can be used. Thread-safe; loads each file
  // once.
  static const Libnccl& load(const LibrarySearch& search);

  const std::string& path() const { return path_; }

  // Returns a text that says how the library was found.
  const std::string& origin() const { return origin_; }

  // Returns NCCL's names of the optional functions that the library lacks.
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  Libnccl(void* handle, std::string path, std::string origin);

  std::string path_;
  std::string origin_;
  std::vector<std::string> missing_;
};

}  // namespace torchcomms_pg
