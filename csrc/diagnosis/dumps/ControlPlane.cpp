#include "diagnosis/dumps/ControlPlane.hpp"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>

#include <mutex>
#include <nlohmann/json.hpp>

#include "base/NeverDestroyed.hpp"
#include "monitor/Monitor.hpp"
#include "recorder/ProcessRecorder.hpp"

namespace torchcomms_pg {

namespace {

using c10d::control_plane::Request;
using c10d::control_plane::Response;
using nlohmann::json;

void answer(Response& response, std::string content, const char* type) {
  response.setContent(std::move(content), type);
  response.setStatus(200);
}

std::shared_ptr<FlightRecorder> recorder() {
  auto found = process_recorder::get();
  // A process without a group also answers: the page shows all processes.
  static const auto& nothing =
      neverDestroyed<std::shared_ptr<FlightRecorder>>(std::make_shared<FlightRecorder>(0, false));
  return found ? found : nothing;
}

void trace(const Request& request, Response& response) {
  FlightRecorder::What what;
  what.entries = request.getParam("includecollectives") != "false";
  what.completed = request.getParam("onlyactive") != "true";
  answer(response, recorder()->json(what), "application/json");
}

void dumpFile(const Request&, Response& response) {
  try {
    const auto path = process_recorder::dump();
    answer(
        response,
        path.empty() ? "Nothing is recorded: there is no group yet, or TORCH_FR_BUFFER_SIZE is 0."
                     : "Flight recorder dump written to " + path,
        "text/plain");
  } catch (const std::exception& error) {
    response.setContent(error.what(), "text/plain");
    response.setStatus(500);
  }
}

void healthCheck(const Request&, Response& response) {
  const auto failures = Monitor::get().failures();
  json health;
  health["healthy"] = failures.empty();
  health["rank"] = recorder()->rank();
  health["failures"] = failures;
  answer(response, health.dump(), "application/json");
}

}  // namespace

void registerControlPlane() {
  static std::once_flag once;
  std::call_once(once, [] {
    using c10d::control_plane::registerHandler;
    try {
      registerHandler("torchcomms_fr_trace_json", trace);
      registerHandler("torchcomms_fr_dump_file", dumpFile);
      registerHandler("torchcomms_health_check", healthCheck);
    } catch (const std::exception& error) {
      TORCH_WARN("the torchcomms pages of the debug server are another package's: ", error.what());
    }
  });
}

}  // namespace torchcomms_pg
