// libnccl, loaded at run time.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/NcclApi.hpp"

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

// Error whose text names what was tried, or the library and its fault, and what to do.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One loaded libnccl, for the rest of the process: its threads may outlive every communicator, so
// it is never unloaded. All functions come from the same handle, so that functions of two copies
// never mix.
class Library {
 public:
  // Loads the first of these that exists: the chosen path; the copy that the process has already
  // loaded, which torch then shares; the package's folder; the file that the system's loader finds.
  // Raises LibraryError. Thread-safe; a file is loaded once.
  static const Library& load(const LibrarySearch& search);

  const NcclApi& api() const { return api_; }
  const std::string& path() const { return path_; }

  // Returns the version as ncclGetVersion reports it, e.g. 23007 for 2.30.7.
  int version() const { return version_; }

  // Returns in words how the library was found.
  const std::string& origin() const { return origin_; }

  // Returns NCCL's names of the optional functions that it lacks.
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
