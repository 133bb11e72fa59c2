#include "comm/ErrorFile.hpp"

#include <chrono>
#include <exception>
#include <mutex>

#include "base/NeverDestroyed.hpp"
#include "monitor/Printer.hpp"
#include "recorder/ProcessRecorder.hpp"
#include "status/Json.hpp"

namespace torchcomms_pg::error_file {

namespace {

struct Place {
  std::mutex mutex;
  std::string path;
};
Place& place() {
  static Place& ofProcess = neverDestroyed<Place>();
  return ofProcess;
}

// Returns the JSON that torch.distributed.elastic.multiprocessing.errors.ErrorHandler writes for an
// exception: torchrun prints "py_callstack", and takes the rank with the least timestamp for the
// one that failed first.
std::string encoded(const std::string& text) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  status::Json json;
  json.object([&] {
    json.objectField("message", [&] {
      json.field("message", text);
      json.objectField("extraInfo", [&] {
        json.field("py_callstack", text);
        json.field("timestamp", std::to_string(seconds));
      });
    });
  });
  return json.take();
}

}  // namespace

void set(const std::string& path) {
  auto& known = place();
  std::lock_guard lock(known.mutex);
  known.path = path;
}

void write(const std::string& text) noexcept {
  try {
    auto& known = place();
    std::lock_guard lock(known.mutex);
    if (!known.path.empty()) {
      writeDump(known.path, encoded(text));
    }
  } catch (const std::exception& error) {
    printLine(std::string("torchcomms_pg: ") + error.what());
  }
}

}  // namespace torchcomms_pg::error_file
