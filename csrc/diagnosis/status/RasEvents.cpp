#include "diagnosis/status/RasEvents.hpp"

#include <set>

#include "diagnosis/status/Json.hpp"
#include "diagnosis/status/RasFormat.hpp"
#include "monitor/Printable.hpp"

namespace torchcomms_pg::status {

std::vector<RasPeer> peersOf(const Job& job) {
  std::vector<RasPeer> peers;
  std::set<const ProcessStatus*> told;  // ranks may be threads of one process
  for (const auto& rank : job.ranks()) {
    if (told.insert(rank.process).second) {
      peers.push_back({printable(rank.process->host), rank.process->pid, "answers", ""});
    }
  }
  for (const auto& quiet : job.quiet()) {
    const auto& process = *quiet.process;
    peers.push_back(
        {nameOfHost(quiet.host->host), process.pid, process.state, printable(process.text)});
  }
  return peers;
}

std::string textOf(const RasEvent& event, bool asJson) {
  const auto& peer = event.peer;
  if (!asJson) {
    return "[" + rasTime() + "] " + event.name + ": Process " + std::to_string(peer.pid) +
           " on node " + peer.host + (peer.text.empty() ? "" : ": " + peer.text) + "\n";
  }
  Json json;
  json.object([&] {
    json.field("timestamp", rasTime());
    json.field("group", event.group == RasEvents::lifecycle ? "LIFECYCLE" : "TRACE");
    json.field("event", event.name);
    json.objectField("peer", [&] {
      json.field("host", peer.host);
      json.field("pid", peer.pid);
      json.listField("cuda_devs", [] {});
      json.listField("nvml_devs", [] {});
    });
    json.field("details", peer.text);
  });
  return json.take() + "\n";
}

std::vector<RasEvent> RasPeers::notice(const std::vector<RasPeer>& peers) {
  std::vector<RasEvent> events;
  for (const auto& peer : peers) {
    const auto [known, isNew] = states_.try_emplace({peer.host, peer.pid}, peer.state);
    const auto before = isNew ? "" : std::exchange(known->second, peer.state);
    if (before == peer.state) {
      continue;
    }
    if (peer.state == "dead") {
      events.push_back({RasEvents::lifecycle, "PEER_DEAD", peer});
    } else if (peer.state != "answers" && (isNew || before == "answers")) {
      events.push_back({RasEvents::trace, "PEER_UNRESPONSIVE", peer});
    } else if (peer.state == "answers") {
      // The pid of a dead process may have been reused.
      const bool fresh = isNew || before == "dead";
      events.push_back(
          {fresh ? RasEvents::lifecycle : RasEvents::trace,
           fresh ? "PEER_NEW" : "PEER_RECOVERED",
           peer});
    }
  }
  if (!std::exchange(looked_, true)) {
    events.clear();
  }
  return events;
}

}  // namespace torchcomms_pg::status
