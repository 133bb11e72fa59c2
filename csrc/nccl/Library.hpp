// libnccl, loaded while the process runs.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/NcclApi.hpp"

namespace torchcomms_pg {

// The library that this torch uses. ROCm's RCCL has NCCL's API, and its versions count alike.
#ifdef TORCHCOMMS_PG_ROCM
inline constexpr const char* kNcclSoname = "librccl.so.1";
#else
inline constexpr const char* kNcclSoname = "libnccl.so.2";
#endif

// Places in which to look for libnccl.
struct LibrarySearch {
  std::string path;    // file chosen by the user; then nothing else is tried
  std::string folder;  // folder of the installed NCCL package; may be empty
  std::string soname = kNcclSoname;
};

// Names what was tried, or the library and what is wrong with it, and what to do.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One loaded libnccl, for the rest of the process: its threads may outlive
// every communicator, so it is never unloaded. All functions come from the one
// handle, so that those of two copies never mix.
class Library {
 public:
  // Loads the first that there is of: the chosen path; the copy that the process has loaded
  // already, which is torch's, and then both use one; the package's folder; what the system's
  // loader finds. Raises LibraryError. Thread-safe; a file is loaded once.
  static const Library& load(const LibrarySearch& search);

  const NcclApi& api() const { return api_; }
  const std::string& path() const { return path_; }

  // Returns the version as ncclGetVersion gives it, e.g. 23007 for 2.30.7.
  int version() const { return version_; }

  // Says in words how the library was found.
  const std::string& origin() const { return origin_; }

  // Returns the optional functions that it lacks, by NCCL's names.
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  Library(void* handle, std::string path, std::string origin);
  static const Library& keep(void* handle, const std::string& origin);

  NcclApi api_;
  std::string path_;
  std::string origin_;
  int version_ = 0;
  std::vector<std::string> missing_;
};

// Returns "2.30.7" for 23007.
std::string versionText(int version);

}  // namespace torchcomms_pg
