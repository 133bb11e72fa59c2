#include "status/StatusServer.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "base/Leaked.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "host/Process.hpp"
#include "monitor/Printer.hpp"
#include "monitor/PythonStackDump.hpp"
#include "status/Folder.hpp"

namespace torchcomms_pg::status {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Limits of connections, and of the time that a client may take to ask and to read.
constexpr size_t kMostClients = 32;
constexpr milliseconds kAsking{2000};
constexpr milliseconds kReading{5000};

// Limit of jobs that are put together at a time; others wait for their turn.
constexpr size_t kMostJobs = 1;

// Time that Python gets to tell its stacks: the whole job's answer is to take less than a second.
constexpr milliseconds kPatience{400};

constexpr int kLookMs = 10;     // interval of looks whether Python has told
constexpr int kTidyMs = 500;    // interval of looks whether a client takes too long
constexpr int kScarceMs = 200;  // time before a connection is taken again, without a descriptor

// What a forked child closes: the parent's socket must not seem to be served by it.
std::atomic<int> ofParent[2] = {-1, -1};

struct AtFork {
  AtFork() {
    pthread_atfork(nullptr, nullptr, [] {
      for (auto& descriptor : ofParent) {
        if (const int number = descriptor.exchange(-1); number >= 0) {
          ::close(number);
        }
      }
    });
  }
};

struct Slot {
  std::mutex mutex;
  std::weak_ptr<StatusServer> server;
  const StatusServer* latest = nullptr;  // owner of the files
  bool told = false;                     // that there is no server
};
Slot& slot() {
  static PerProcess<Slot> ofProcess;
  return ofProcess.get();
}

struct FolderName {
  std::mutex mutex;
  std::string path;
};
FolderName& folderName() {
  static FolderName& name = leaked<FolderName>();
  return name;
}

}  // namespace

struct StatusServer::State {
  // A client, from its connection to the end of its answer.
  struct Client {
    enum class Phase { asks, awaitsPython, awaitsTurn, awaitsJob, reads };

    uint64_t number = 0;
    Descriptor socket;
    Phase phase = Phase::asks;
    Clock::time_point until;  // end of its time, or of Python's
    std::string text;         // question, then answer
    size_t sent = 0;
    std::optional<Description> description;
    std::shared_ptr<PythonStackDump> dump;
    bool ownStacks = false;  // the dump is about its description's
    OfJob job;
  };
  using Clients = std::list<Client>;

  State(Duties given, const std::string& path) : duties(std::move(given)), folder(path) {}

  const Duties duties;
  const Folder folder;
  Descriptor listening;
  Descriptor wake;
  std::atomic<bool> stop{false};

  std::mutex mutex;
  std::map<uint64_t, std::string> done;  // jobs by client

  // State of the thread.
  Clients clients;
  uint64_t number = 0;
  size_t jobs = 0;
  std::shared_ptr<PythonStackDump> dump;  // the last question to Python
  Clock::time_point scarceUntil{};

  void notify() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto told = write(wake.get(), &one, sizeof one);
  }

  void run(const std::shared_ptr<State>& self) {
    while (!stop.load(std::memory_order_acquire)) {
      std::vector<pollfd> polled{{wake.get(), POLLIN, 0}};
      const bool takes = clients.size() < kMostClients && Clock::now() >= scarceUntil;
      polled.push_back({takes ? listening.get() : -1, POLLIN, 0});
      for (const auto& client : clients) {
        const short events = client.phase == Client::Phase::asks    ? POLLIN
                             : client.phase == Client::Phase::reads ? POLLOUT
                                                                    : 0;
        const bool works = client.phase == Client::Phase::awaitsJob;  // whether anybody reads it
        polled.push_back({works ? -1 : client.socket.get(), events, 0});
      }
      poll(polled.data(), polled.size(), patience());
      uint64_t rings = 0;
      [[maybe_unused]] const auto heard = read(wake.get(), &rings, sizeof rings);
      size_t place = 2;
      for (auto client = clients.begin(); client != clients.end(); ++place) {
        const auto each = client++;
        try {
          if (!step(self, *each, polled[place].revents)) {
            drop(each);
          }
        } catch (const std::exception&) {
          drop(each);  // out of memory
        }
      }
      if (polled[1].revents != 0) {
        take();
      }
    }
    while (!clients.empty()) {
      drop(clients.begin());
    }
    listening = Descriptor();  // the file is gone; whoever has connected is told
  }

  int patience() const {
    const bool asks = std::ranges::any_of(
        clients, [](const auto& each) { return each.phase == Client::Phase::awaitsPython; });
    if (asks) {
      return kLookMs;
    }
    if (Clock::now() < scarceUntil) {
      return kScarceMs;
    }
    return clients.empty() ? -1 : kTidyMs;
  }

  void take() {
    Descriptor socket(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        scarceUntil = Clock::now() + milliseconds(kScarceMs);
      }
      return;
    }
    if (ofThisUser(socket.get())) {
      clients.emplace_back();
      auto& client = clients.back();
      client.number = ++number;
      client.socket = std::move(socket);
      client.until = Clock::now() + kAsking;
    }
  }

  void drop(Clients::iterator client) {
    // A child that was forked meanwhile has the connection, too.
    shutdown(client->socket.get(), SHUT_RDWR);
    clients.erase(client);
  }

  // Goes on with a client. Returns false once it is done, or has had its time.
  bool step(const std::shared_ptr<State>& self, Client& client, short events) {
    using Phase = Client::Phase;
    const auto now = Clock::now();
    if ((events & (POLLERR | POLLNVAL)) != 0 ||
        (client.phase != Phase::asks && (events & POLLHUP) != 0)) {
      return false;
    }
    switch (client.phase) {
      case Phase::asks: return events != 0 ? hear(client, now) : now < client.until;
      case Phase::awaitsPython:
        if (client.dump->answered() || now >= client.until) {
          answer(client, answered(encode(finished(client, now))), now);
        }
        return true;
      case Phase::awaitsTurn:
        if (jobs < kMostJobs) {
          beginJob(self, client, now);
        }
        return true;
      case Phase::awaitsJob: {
        std::lock_guard lock(mutex);
        if (auto text = done.extract(client.number)) {
          --jobs;
          answer(client, std::move(text.mapped()), now);
        }
        return true;
      }
      case Phase::reads: return events != 0 ? tell(client) : now < client.until;
    }
    return false;
  }

  bool hear(Client& client, Clock::time_point now) {
    char buffer[kLongestQuestion];
    const auto bytes = recv(client.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (bytes <= 0) {
      return bytes < 0 && (errno == EAGAIN || errno == EINTR);
    }
    client.text.append(buffer, static_cast<size_t>(bytes));
    if (client.text.find('\n') == std::string::npos) {
      return client.text.size() < kLongestQuestion;
    }
    if (client.text == kOfProcess) {
      describe(client, now);
    } else if (const auto job = parseOfJob(client.text)) {
      client.job = *job;
      client.phase = Client::Phase::awaitsTurn;
      notify();
    } else {
      answer(client, refused("this question is not known"), now);
    }
    return true;
  }

  void describe(Client& client, Clock::time_point now) {
    client.description = duties.describe();
    // A thread that waits for the GIL is one too many already where it is held for long.
    client.ownStacks = !dump || dump->answered();
    if (client.ownStacks) {
      dump = std::make_shared<PythonStackDump>(client.description->stacks);
    }
    client.description->stacks.clear();
    client.dump = dump;
    client.until = now + kPatience;
    client.phase = Client::Phase::awaitsPython;
  }

  static ProcessStatus finished(Client& client, Clock::time_point now) {
    auto status = std::move(client.description->status);
    if (client.dump->answered()) {
      const auto told = client.dump->tell();
      status.threads = told.threads;
      if (client.ownStacks) {
        client.description->setLines(status, told.calledAt);
      }
    } else {
      status.pythonSilentMs =
          std::chrono::duration_cast<milliseconds>(now - client.dump->begun()).count();
      status.threads = PythonStackDump::seenWithoutGil();
    }
    client.description.reset();
    return status;
  }

  void beginJob(const std::shared_ptr<State>& self, Client& client, Clock::time_point now) {
    try {
      startDetached("tcpg_job", [self, number = client.number, job = client.job] {
        std::string text;
        try {
          text = answered(self->duties.ofJob(job));
        } catch (const std::exception& error) {
          text = refused(error.what());
        }
        {
          std::lock_guard lock(self->mutex);
          self->done[number] = std::move(text);
        }
        self->notify();
      });
      ++jobs;
      client.phase = Client::Phase::awaitsJob;
    } catch (const std::exception& error) {
      answer(client, refused(std::string("no thread can be started: ") + error.what()), now);
    }
  }

  static void answer(Client& client, std::string text, Clock::time_point now) {
    client.text = std::move(text);
    client.phase = Client::Phase::reads;
    client.until = now + kReading;
  }

  static bool tell(Client& client) {
    const auto bytes = send(
        client.socket.get(),
        client.text.data() + client.sent,
        client.text.size() - client.sent,
        MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes < 0) {
      return errno == EAGAIN || errno == EINTR;
    }
    client.sent += static_cast<size_t>(bytes);
    return client.sent < client.text.size();
  }
};

void StatusServer::setFolder(const std::string& path) {
  auto& name = folderName();
  std::lock_guard lock(name.mutex);
  name.path = path;
}

std::string StatusServer::folder() {
  auto& name = folderName();
  std::lock_guard lock(name.mutex);
  return name.path;
}

std::shared_ptr<StatusServer> StatusServer::of(const Duties& duties) {
  if (folder().empty()) {
    return nullptr;
  }
  auto& known = slot();
  std::lock_guard lock(known.mutex);
  auto server = known.server.lock();
  if (!server) {
    try {
      server = std::make_shared<StatusServer>(duties);
      known.server = server;
      known.latest = server.get();
    } catch (const std::exception& error) {
      if (!std::exchange(known.told, true)) {
        printLine(
            "torchcomms_pg: process " + std::to_string(host::processId()) +
            " has no status for python -m torchcomms_pg.status: " + error.what());
      }
    }
  }
  return server;
}

StatusServer::StatusServer(Duties duties)
    : state_(std::make_shared<State>(std::move(duties), folder())), pid_(host::processId()) {
  static const AtFork atFork;
  state_->wake = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!state_->wake) {
    throw std::runtime_error("no descriptor is free");
  }
  state_->folder.sweep();
  state_->listening = state_->folder.listen();
  try {
    startDetached("tcpg_status", "its status", [state = state_] { state->run(state); });
  } catch (const std::exception&) {
    state_->folder.remove();
    throw;
  }
  ofParent[0] = state_->listening.get();
  ofParent[1] = state_->wake.get();
}

StatusServer::~StatusServer() {
  if (pid_ != host::processId()) {
    return;  // the parent's
  }
  auto& known = slot();
  {
    std::lock_guard lock(known.mutex);
    if (known.latest == this) {
      known.latest = nullptr;
      state_->folder.remove();
      ofParent[0] = -1;
      ofParent[1] = -1;
    }
  }
  state_->stop.store(true, std::memory_order_release);
  state_->notify();
}

void StatusServer::add(const Membership& membership) noexcept {
  try {
    state_->folder.add(membership);
  } catch (const std::exception&) {
    // No descriptor is free: nobody knows whose process this is, if it does not answer.
  }
}

void StatusServer::removeAtExit() noexcept {
  auto& known = slot();
  std::shared_ptr<StatusServer> server;
  {
    std::lock_guard lock(known.mutex);
    server = known.server.lock();
  }
  if (server) {
    server->state_->folder.remove();
  }
}

}  // namespace torchcomms_pg::status
