#include "diagnosis/group/ErrorFile.hpp"

#include <unistd.h>

#include <chrono>
#include <exception>
#include <fstream>
#include <iterator>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"
#include "diagnosis/status/Json.hpp"
#include "monitor/Printer.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg::error_file {

namespace {

struct Place {
  Mutex mutex;
  std::string path GUARDED_BY(mutex);
  std::string text GUARDED_BY(mutex);     // the latest text
  std::string content GUARDED_BY(mutex);  // what write() has written into the file for it
};
Place& place = neverDestroyed<Place>();

// Returns the JSON that torch.distributed.elastic.multiprocessing.errors.ErrorHandler writes for an
// exception: torchrun prints "py_callstack", and takes the rank with the least timestamp for the
// one that failed first.
std::string encoded(const std::string& text, const std::vector<int64_t>& ranks) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  status::Json json;
  json.object([&] {
    json.objectField("message", [&] {
      json.field("message", text);
      json.objectField("extraInfo", [&] {
        json.field("py_callstack", text);
        json.field("timestamp", std::to_string(seconds));
        json.field("ranks", ranks);
      });
    });
  });
  return json.take();
}

}  // namespace

void set(const std::string& path) {
  LockGuard lock(place.mutex);
  place.path = path;
}

void write(const std::string& text, const std::vector<int64_t>& ranks) noexcept try {
  LockGuard lock(place.mutex);
  if (!place.path.empty()) {
    auto content = encoded(text, ranks);
    writeDump(place.path, content);
    place.text = text;
    place.content = std::move(content);
  }
} catch (const std::exception& error) {
  printError(error);
}

void withdraw(const std::string& text) noexcept try {
  LockGuard lock(place.mutex);
  if (place.content.empty() || place.text != text) {
    return;
  }
  // torch's `record` may have written the program's exception meanwhile.
  std::ifstream file(place.path, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  if (content == place.content) {
    ::unlink(place.path.c_str());
  }
  place.content.clear();
} catch (const std::exception& error) {
  printError(error);
}

}  // namespace torchcomms_pg::error_file
