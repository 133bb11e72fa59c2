// Answers to NCCL's client of RAS: what it says, the two formats, and what watchers are told.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "Check.hpp"
#include "Jobs.hpp"
#include "diagnosis/status/RasDialogue.hpp"
#include "diagnosis/status/RasEvents.hpp"
#include "diagnosis/status/RasFormat.hpp"
#include "diagnosis/status/StatusServer.hpp"

using namespace torchcomms_pg;
using namespace torchcomms_pg::status;

namespace {

std::string answersTo(RasDialogue& dialogue, const std::string& said) {
  std::string answers;
  CHECK(dialogue.hear(said, answers));
  return answers;
}

size_t countOf(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) {
    ++count;
  }
  return count;
}

// A port of 127.0.0.1 where nobody else may listen but who shares it.
struct HeldPort {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};

  HeldPort() {
    const int yes = 1;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    CHECK(setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0);
    CHECK(setsockopt(socket, SOL_SOCKET, SO_REUSEPORT, &yes, sizeof yes) == 0);
    CHECK(bind(socket, name, sizeof address) == 0);
    CHECK(getsockname(socket, name, &bytes) == 0);
  }
  ~HeldPort() { close(socket); }

  int connect() const {
    const int client = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(::connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    return client;
  }
};

void sendAll(int client, const std::string& text) {
  CHECK(send(client, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()));
}

// Returns what is sent until the end; none: the connection has broken.
std::optional<std::string> readAll(int client) {
  std::string all;
  char buffer[65536];
  for (;;) {
    const auto bytes = recv(client, buffer, sizeof buffer, 0);
    if (bytes <= 0) {
      close(client);
      return bytes == 0 ? std::optional(all) : std::nullopt;
    }
    all.append(buffer, static_cast<size_t>(bytes));
  }
}

}  // namespace

TEST(aClientOfRasGetsAllOfItsAnswerWhateverItSendsAfterItsQuestion) {
  char folder[] = "/tmp/ras_test_XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  const HeldPort port;
  StatusServer::setFolder(folder);
  StatusServer::setRasAddress("localhost:" + std::to_string(ntohs(port.address.sin_port)));
  const std::string body(8 << 20, 'x');
  auto server = StatusServer::of(
      {[] { return Description(); },
       [](const OfJob&) { return std::string(); },
       [&](const RasQuestion& question) { return question.json ? body : "text\n"; },
       [] { return std::vector<RasPeer>{{"a", 1, "answers", ""}}; }});
  CHECK(server != nullptr);
  const int watches = port.connect();
  sendAll(watches, "MONITOR all\n");
  const int neverReads = port.connect();
  sendAll(neverReads, "SET FORMAT json\nSTATUS\n");
  for (int i = 0; i < 4; ++i) {
    const int client = port.connect();
    sendAll(client, "SET FORMAT json\nSTATUS\n" + std::string(10'000, 'y'));
    const auto answer = readAll(client);
    CHECK(answer.has_value());
    CHECK(*answer == "OK\n" + body);
  }
  server.reset();
  CHECK_EQUAL(readAll(watches).value_or("broken"), std::string("OK\n"));
  close(neverReads);
  StatusServer::setFolder("");
  StatusServer::setRasAddress("");
  std::filesystem::remove_all(folder);
}

TEST(whatAClientOfRasSaysIsUnderstoodInWhateverPiecesItComes) {
  const std::string said =
      "client PROTOCOL 2\nTIMEOUT 7\r\nset format JSON\nverbose status\nset format text\n";
  const std::string answers = "SERVER PROTOCOL 2\nOK\nOK\n";
  for (size_t piece = 1; piece <= said.size(); ++piece) {
    RasDialogue dialogue;
    std::string heard;
    for (size_t at = 0; at < said.size(); at += piece) {
      CHECK(dialogue.hear(said.substr(at, piece), heard));
    }
    CHECK_EQUAL(heard, answers);
    CHECK(dialogue.asked()->json && dialogue.asked()->verbose);
    CHECK_EQUAL(dialogue.asked()->waitMs, int64_t{7000});
  }
  RasDialogue plain;
  CHECK_EQUAL(answersTo(plain, "STATUS\n"), std::string());
  CHECK(!plain.asked()->json && !plain.asked()->verbose);
  CHECK(plain.asked()->waitMs < 1000);
}

TEST(aTimeoutOfRasHasALimitOfItsOwn) {
  for (const auto& [seconds, ms] :
       {std::pair("0", 10'000), {"11", 10'000}, {"9223372036854775807", 10'000}, {"1", 1000}}) {
    RasDialogue dialogue;
    CHECK_EQUAL(
        answersTo(dialogue, std::string("timeout ") + seconds + "\nstatus\n"), std::string("OK\n"));
    CHECK_EQUAL(dialogue.asked()->waitMs, int64_t{ms});
  }
  RasDialogue dialogue;
  for (const auto* const wrong : {"", "x", "1 2", "-1", "9223372036854775808"}) {
    CHECK_CONTAINS(answersTo(dialogue, std::string("timeout ") + wrong + "\n"), "ERROR: a timeout");
  }
}

TEST(aLineOfRasThatIsTooLongEndsTheDialogue) {
  RasDialogue dialogue;
  std::string answers;
  CHECK(dialogue.hear(std::string(RasDialogue::kLongestLine, 'x'), answers));
  CHECK(!dialogue.hear("x", answers));
  RasDialogue other;
  CHECK(!other.hear(std::string(RasDialogue::kLongestLine + 1, 'x') + "\n", answers));
  CHECK(answers.empty());
}

TEST(watchersOfRasNameTheEventsThatTheyWant) {
  RasDialogue dialogue;
  CHECK(dialogue.events() == RasEvents::none);
  CHECK_CONTAINS(answersTo(dialogue, "monitor trace,\n"), "ERROR: events are");
  CHECK(dialogue.events() == RasEvents::none);
  answersTo(dialogue, "monitor\n");
  CHECK(dialogue.events() == RasEvents::lifecycle);
  answersTo(dialogue, "monitor TRACE\n");
  CHECK(dialogue.events() == RasEvents::trace);
  answersTo(dialogue, "monitor lifecycle,trace\n");
  CHECK(dialogue.events() == RasEvents::all);
  CHECK(!dialogue.asked());
}

TEST(whatHappensToProcessesIsToldOnceAndNotOfTheFirstLook) {
  const RasPeer here{"a", 1, "answers", ""};
  const RasPeer stopped{"a", 1, "stopped", "stopped"};
  const RasPeer silent{"a", 1, "silent", "silent"};
  const RasPeer dead{"a", 1, "dead", "dead"};
  const RasPeer other{"b", 1, "answers", ""};
  RasPeers peers;
  const auto names = [&](const std::vector<RasPeer>& seen) {
    std::string text;
    for (const auto& event : peers.notice(seen)) {
      text +=
          event.peer.host + " " + event.name + (event.group == RasEvents::trace ? "*" : "") + ";";
    }
    return text;
  };
  CHECK_EQUAL(names({here}), std::string());
  CHECK_EQUAL(names({here, other}), std::string("b PEER_NEW;"));
  CHECK_EQUAL(names({stopped, other}), std::string("a PEER_UNRESPONSIVE*;"));
  CHECK_EQUAL(names({silent}), std::string());  // the other host has not answered
  CHECK_EQUAL(names({here, other}), std::string("a PEER_RECOVERED*;"));
  CHECK_EQUAL(names({dead, other}), std::string("a PEER_DEAD;"));
  CHECK_EQUAL(names({dead, other}), std::string());
  CHECK_EQUAL(names({here, other}), std::string("a PEER_NEW;"));
  const auto text = textOf({RasEvents::lifecycle, "PEER_DEAD", dead}, /*json=*/true);
  CHECK_CONTAINS(text, "\"group\":\"LIFECYCLE\",\"event\":\"PEER_DEAD\",\"peer\":{\"host\":\"a\"");
  CHECK(text.ends_with("}\n"));
}

TEST(theRankThatAThousandOthersWaitForIsBehindThemInRas) {
  constexpr int kRanks = 1024;
  std::vector<ProcessStatus> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes.push_back(rankOf(rank, kRanks, rank == 77 ? 3 : 4, rank != 77));
  }
  const auto hosts = hostsOf(processes);
  const std::vector<UnreachedHost> unreached;
  const auto asked = question();
  const Job job(hosts, unreached, asked);
  const auto begun = std::clock();
  const auto json = rasJson(job);
  const auto text = rasText(job, /*verbose=*/true);
  std::printf(
      "1024 ranks: %d ms of CPU for both formats of RAS\n",
      static_cast<int>((std::clock() - begun) * 1000 / CLOCKS_PER_SEC));
  CHECK_CONTAINS(
      text, "    0         1       128         8      1024      1024   RUNNING  MISMATCH\n");
  CHECK_CONTAINS(text, "#0-0 (0000000000000063) MISMATCH\n  Group 'world' (), 1024 ranks\n");
  CHECK_CONTAINS(text, "  AllReduce 3: rank 77\n");
  CHECK_CONTAINS(text, "  AllReduce 4: ranks 0, 1, ");
  CHECK_CONTAINS(
      rasText(job, false),
      "  AllReduce 4: ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ... (1023 in all)\n");
  CHECK_CONTAINS(text, "NCCL version unknown (torchcomms_pg 1.2.3) compiled with CUDA unknown\n");
  CHECK_CONTAINS(json, "\"hash\":\"0x63\"");
  CHECK_EQUAL(countOf(json, "\"AllReduce\":4"), size_t{1023});
  CHECK_EQUAL(countOf(json, "\"AllReduce\":3"), size_t{1});
  CHECK_CONTAINS(
      json, "\"verdict\":\"verdict on group 'world', 1024 ranks: rank 77 has not arrived");
}

TEST(hostsWithDifferentNumbersOfProcessesHaveATableOfTheirOwn) {
  std::vector<ProcessStatus> processes;
  for (int rank = 0; rank < 20; ++rank) {
    processes.push_back(rankOf(rank, 20, 4, false));
  }
  const auto hosts = hostsOf(processes);
  const std::vector<UnreachedHost> unreached;
  const auto asked = question();
  const auto text = rasText(Job(hosts, unreached, asked), false);
  CHECK_CONTAINS(text, "      2          8           -1\n      1          4           -1\n");
  CHECK_CONTAINS(text, "      3         20           -1\n");
  CHECK_CONTAINS(
      text, "    0         1         3       4-8        20        20   RUNNING      OK\n");
}

TEST(ofMissingRanksRasSaysWhetherTheirProcessesAreSilentDeadOrElsewhere) {
  std::vector<ProcessStatus> processes{rankOf(0, 6, 4, false), rankOf(1, 6, 4, false)};
  processes[1].ranks.front().groups.front().failure = "rank 5 died\nat once";
  // Rank 2 is in another group of the job, and rank 3 too, which has left this one.
  auto& second = processes.emplace_back(rankOf(2, 6, 4, false));
  second.ranks.front().groups.push_back(second.ranks.front().groups.front());
  second.ranks.front().groups.back().id = kId + 1;
  auto& third = processes.emplace_back(rankOf(3, 6, 4, false));
  third.ranks.front().groups.front().id = kId + 1;
  auto hosts = hostsOf(processes);
  hosts.front().silent.push_back({1004, "did not answer", "silent", {{kId, 4}}});
  const std::vector<UnreachedHost> unreached{{"host1/3-4", "has not answered in time"}};
  const auto asked = question();
  const Job job(hosts, unreached, asked);
  const auto json = rasJson(job);
  const auto rank = [](int number, const char* host, int pid) {
    return "{\"rank\":" + std::to_string(number) + ",\"host\":\"" + host +
           "\",\"pid\":" + std::to_string(pid) +
           ",\"cuda_dev\":-1,\"nvml_dev\":-1,\"global_rank\":" + std::to_string(number) +
           ",\"status\":{";
  };
  CHECK_CONTAINS(
      json, rank(3, "host0", 1003) + "\"unresponsive\":false,\"considered_dead\":false}");
  CHECK_CONTAINS(json, rank(4, "host0", 1004) + "\"unresponsive\":true,\"considered_dead\":false}");
  CHECK_CONTAINS(json, rank(5, "unknown", -1) + "\"unresponsive\":true,\"considered_dead\":false}");
  CHECK_CONTAINS(
      json,
      rank(1, "host0", 1001) +
          "\"init_state\":0,\"async_error\":6,\"finalize_called\":false,\"destroy_flag\":false,"
          "\"abort_flag\":true}");
  CHECK_CONTAINS(json, "\"timeouts_count\":2");
  const auto text = rasText(job, false);
  CHECK_CONTAINS(text, "         3     ABORT  INCOMPLETE,ERROR,MISMATCH\n");
  CHECK_CONTAINS(
      text, "INCOMPLETE\n  Processes that do not answer: 1\n  Process 1004 on node host0: ");
  CHECK_CONTAINS(
      text, "  Rank 4 -- process 1004 on node host0: did not answer\n  Rank 5: no process");
  CHECK_CONTAINS(text, "  Rank 1 -- process 1001 on node host0: rank 5 died\n\n");
  CHECK_CONTAINS(text, "TIMEOUT\n  host1: has not answered in time\n");
  CHECK_CONTAINS(text, "  NOCOMM: rank 3\n  RUNNING: ranks 0, 2\n  ABORT: rank 1\n");
}
