// libnccl, loaded at run time.
#pragma once

#include <string>
#include <vector>

#include "nccl/NcclLibrary.hpp"

namespace torchcomms_pg {

// Name of the library that this build of torch uses. ROCm's RCCL has NCCL's API and numbers its
// versions like NCCL.
#ifdef TORCHCOMMS_PG_ROCM
inline constexpr const char* kNcclSoname = "librccl.so.1";
#else
inline constexpr const char* kNcclSoname = "libnccl.so.2";
#endif

// Places in which to look for libnccl.
struct LibrarySearch {
  std::string path;    // file chosen by the user; if set, nothing else is tried
  std::string folder;  // folder of the installed NCCL package; may be empty
  std::string soname = kNcclSoname;
};

// One loaded libnccl, which is never unloaded. All functions come from the same handle, so that
// functions of two copies never mix.
class Libnccl final : public NcclLibrary {
 public:
  // Loads the first of these that exists: the chosen path; the copy that the process has already
  // loaded, which torch then shares; the package's folder; the file that the system's loader finds.
  // Raises LibraryError. Thread-safe; a file is loaded once.
  static const Libnccl& load(const LibrarySearch& search);

  const std::string& path() const { return path_; }
  int version() const override { return version_; }

  // Returns in words how the library was found.
  const std::string& origin() const { return origin_; }

  // Returns NCCL's names of the optional functions that it lacks.
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  Libnccl(void* handle, std::string path, std::string origin);
  static const Libnccl& keep(void* handle, const std::string& origin);

  std::string path_;
  std::string origin_;
  int version_ = 0;
  std::vector<std::string> missing_;
};

}  // namespace torchcomms_pg
