#include "nccl/Libnccl.hpp"

#include <dlfcn.h>
#include <link.h>

#include <map>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"

namespace torchcomms_pg {

namespace {

constexpr int kOldest = 21800;  // has every required function

constexpr const char* kInstall =
#ifdef TORCHCOMMS_PG_ROCM
    "It comes with a torch that is built for ROCm; or set TORCHCOMM_NCCL_LIBRARY to the path of "
    "librccl.so.1";
#else
    "Install it with pip install 'nvidia-nccl-cu12>=2.28.7,<3' (not beside a torch that depends on "
    "nvidia-nccl-cu13, which brings it), or set TORCHCOMM_NCCL_LIBRARY to the path of libnccl.so.2";
#endif

// Returns the path of the library that the process has mapped, or an empty string if the process
// has mapped none.
std::string mappedPath(const std::string& soname) {
  struct Search {
    std::string start;  // "libnccl.so": some packages ship it without a number
    std::string path;
  } search{soname.substr(0, soname.rfind('.')), ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& [start, path] = *static_cast<Search*>(data);
        const std::string_view name = info->dlpi_name;
        const auto file = name.substr(name.rfind('/') + 1);
        if (!file.starts_with(start)) {
          return 0;
        }
        path = name;
        return 1;
      },
      &search);
  return search.path;
}

// Returns the file from which a handle was loaded.
std::string pathOf(void* handle) {
  const link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? map->l_name : "";
}

std::string lastLoaderError() {
  const char* const text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

}  // namespace

Libnccl::Libnccl(void* handle, std::string path, std::string origin)
    : path_(std::move(path)), origin_(std::move(origin)) {
  std::vector<std::string> absent;
  const auto resolve = [&](auto& field, const char* name, std::vector<std::string>& lacking) {
    void* const symbol = dlsym(handle, name);
    field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(symbol);
    if (symbol == nullptr) {
      lacking.emplace_back(name);
    }
  };
#define TORCHCOMMS_PG_RESOLVE(field, function) resolve(table_.field, #function, absent);
  TORCHCOMMS_PG_NCCL_REQUIRED(TORCHCOMMS_PG_RESOLVE)
#undef TORCHCOMMS_PG_RESOLVE
#define TORCHCOMMS_PG_RESOLVE(field, function) resolve(table_.field, #function, missing_);
  TORCHCOMMS_PG_NCCL_OPTIONAL(TORCHCOMMS_PG_RESOLVE)
#undef TORCHCOMMS_PG_RESOLVE

  int version = 0;
  if (table_.getVersion == nullptr || table_.getVersion(&version) != ncclSuccess) {
    throw LibraryError(
        path_ + " (" + origin_ + ") is not NCCL: it does not tell its version by ncclGetVersion. " +
        kInstall);
  }
  const auto what = "NCCL " + versionText(version) + " at " + path_ + " (" + origin_ + ")";
  if (!absent.empty()) {
    std::string names;
    for (const auto& name : absent) {
      names += (names.empty() ? "" : ", ") + name;
    }
    throw LibraryError(
        what + " lacks " + names + ", which every NCCL from " + versionText(kOldest) + " on has. " +
        kInstall);
  }
  if (version < kOldest) {
    throw LibraryError(
        what + " is too old: torchcomms_pg needs " + versionText(kOldest) + " or later. " +
        kInstall);
  }
}

const Libnccl& Libnccl::load(const LibrarySearch& search) {
  // Never destroyed: the library's threads may run until the process ends.
  struct Loaded {
    Mutex mutex;
    std::map<void*, std::unique_ptr<const Libnccl>> all GUARDED_BY(mutex);  // by handle
  };
  static auto& loaded = neverDestroyed<Loaded>();
  const LockGuard lock(loaded.mutex);
  const auto keep = [](void* handle, const char* origin) REQUIRES(loaded.mutex) {
    auto& library = loaded.all[handle];
    if (library == nullptr) {
      library.reset(new Libnccl(handle, pathOf(handle), origin));
    } else {
      // dlopen has returned the same handle, even if it was by another path. The first load keeps
      // the file open.
      dlclose(handle);
    }
    return library.get();
  };
  // Loads only with RTLD_LOCAL: NCCL calls its own functions by name, so a copy in the global scope
  // would replace the functions of another copy.
  constexpr int kFlags = RTLD_NOW | RTLD_LOCAL;
  if (!search.path.empty()) {
    void* const handle = dlopen(search.path.c_str(), kFlags);
    if (handle == nullptr) {
      throw LibraryError(
          "the NCCL library that was chosen cannot be loaded: " + lastLoaderError() +
          ". Set TORCHCOMM_NCCL_LIBRARY, or the option nccl_library, to the path of libnccl.so.2, "
          "or leave it unset to use torch's");
    }
    return *keep(handle, "chosen by TORCHCOMM_NCCL_LIBRARY or an option");
  }
  std::string tried;
  const auto open = [&](const std::string& file, int flags) {
    void* const handle = dlopen(file.c_str(), flags);
    if (handle == nullptr) {
      tried += "\n  " + file + ": " + lastLoaderError();
    }
    return handle;
  };
  const auto mapped = mappedPath(search.soname);
  if (mapped.empty()) {
    tried += "\n  the libraries of this process: none is " + search.soname;
  } else if (void* const handle = open(mapped, kFlags | RTLD_NOLOAD)) {
    return *keep(handle, "loaded by torch already");
  }
  if (search.folder.empty()) {
    tried += "\n  Python's packages: no nvidia.nccl is installed";
  } else if (void* const handle = open(search.folder + "/lib/" + search.soname, kFlags)) {
    return *keep(handle, "of the installed NCCL package");
  }
  if (void* const handle = open(search.soname, kFlags)) {
    return *keep(handle, "found by the system's loader");
  }
  throw LibraryError("NCCL's library was not found. Tried:" + tried + "\n" + kInstall);
}

}  // namespace torchcomms_pg
