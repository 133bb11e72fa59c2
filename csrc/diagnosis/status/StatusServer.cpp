#include "diagnosis/status/StatusServer.hpp"

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
#include <optional>
#include <stdexcept>
#include <utility>

#include "base/Mutex.hpp"
#include "base/NeverDestroyed.hpp"
#include "base/PerProcess.hpp"
#include "base/Thread.hpp"
#include "diagnosis/rank/PythonStackDump.hpp"
#include "diagnosis/status/Folder.hpp"
#include "host/Process.hpp"
#include "monitor/Printer.hpp"

namespace torchcomms_pg::status {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Limits of connections, and of the time that a client may take to ask and to read.
constexpr size_t kMostClients = 32;
constexpr milliseconds kAsking{2000};
constexpr milliseconds kReading{5000};

// Limit of the wait for Python's stacks: the whole job's answer is to take less than a second.
constexpr milliseconds kPatience{400};

// The same limit if another thread is known to hold the GIL.
constexpr milliseconds kPatienceIfHeld{250};

constexpr int kLookMs = 10;     // interval of checks whether Python has answered
constexpr int kTidyMs = 500;    // interval of checks whether a client is too slow
constexpr int kScarceMs = 200;  // pause in accepting when descriptors run out

// Descriptors that a forked child closes, so that it does not keep the parent's sockets open.
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
  Mutex mutex;
  std::weak_ptr<StatusServer> server GUARDED_BY(mutex);
  const StatusServer* latest GUARDED_BY(mutex) = nullptr;  // owner of the files
  bool told GUARDED_BY(mutex) = false;                     // it was reported that no server runs
  bool toldOfRas GUARDED_BY(mutex) = false;                // it was reported that no gateway runs
};
PerProcess<Slot> slot;

struct Places {
  Mutex mutex;
  std::string folder GUARDED_BY(mutex);
  GatewayCommand gateway GUARDED_BY(mutex);
};
Places& places() {
  static Places& named = neverDestroyed<Places>();
  return named;
}
GatewayCommand gatewayCommand() {
  LockGuard lock(places().mutex);
  return places().gateway;
}

// Reports once that RAS clients get no answer, and why.
void tellNoRas(Slot& known, const std::string& address, const std::string& why)
    REQUIRES(known.mutex) {
  if (!std::exchange(known.toldOfRas, true)) {
    printLine(
        "torchcomms_pg: nothing answers ncclras at TORCHCOMMS_PG_RAS_ADDR=" + address +
        " for process " + std::to_string(host::processId()) + ": " + why);
  }
}

void startGateway() {
  auto command = gatewayCommand();
  if (command.words.empty()) {
    return;
  }
  const auto address = command.words.back();
  command.words.insert(command.words.end(), {"--of", Folder::own().name()});
  try {
    runApart(std::move(command.words), std::move(command.environment));
  } catch (const std::exception& error) {
    auto& known = slot.get();
    LockGuard lock(known.mutex);
    tellNoRas(known, address, error.what());
  }
}

}  // namespace

struct StatusServer::State {
  // A client, from its connection to the end of its answer.
  struct Client {
    enum class Phase { asks, awaitsPython, awaitsTurn, awaitsJob, reads };

    FileDescriptor socket;
    Phase phase = Phase::asks;
    Clock::time_point until;  // limit of the wait for the client, or for Python
    std::string heard;        // received part of the question
    std::string text;         // answer, whose first `sent` bytes are sent
    size_t sent = 0;
    std::optional<Description> description;
    std::shared_ptr<PythonStackDump> dump;
    bool ownStacks = false;  // the dump includes the stacks of `description`
    OfJob job;

    bool hasUnsent() const { return sent < text.size(); }
  };
  using Clients = std::list<Client>;

  State(Duties given, const std::string& path) : duties(std::move(given)), folder(path) {}

  const Duties duties;
  const Folder folder;
  FileDescriptor listening;
  FileDescriptor wake;
  std::atomic<bool> stop{false};

  Mutex mutex;
  std::optional<std::string> done GUARDED_BY(mutex);  // the answer about the job

  // State of the server's thread.
  Clients clients;
  bool asksJob = false;  // for a client, in a thread; further clients wait for their turn
  std::shared_ptr<PythonStackDump> dump;  // the latest request to Python
  Clock::time_point scarceUntil{};

  void notify() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto told = write(wake.get(), &one, sizeof one);
  }

  void run(const std::shared_ptr<State>& self) {
    while (!stop.load(std::memory_order_acquire)) {
      try {
        serveOnce(self);
      } catch (const std::exception&) {
        std::this_thread::sleep_for(milliseconds(kScarceMs));  // out of memory
      }
    }
    while (!clients.empty()) {
      drop(clients.begin());
    }
    // Ends connections that were not accepted. The socket's file has been removed or replaced.
    listening = FileDescriptor();
  }

  void serveOnce(const std::shared_ptr<State>& self) {
    using Phase = Client::Phase;
    std::vector<pollfd> polled{{wake.get(), POLLIN, 0}};
    const bool scarce = Clock::now() < scarceUntil;
    polled.push_back({clients.size() < kMostClients && !scarce ? listening.get() : -1, POLLIN, 0});
    for (const auto& client : clients) {
      const short events = client.phase == Phase::asks    ? POLLIN
                           : client.phase == Phase::reads ? POLLOUT
                                                          : 0;
      // A job goes on even if its client has left.
      const bool works = client.phase == Phase::awaitsJob;
      polled.push_back({works ? -1 : client.socket.get(), events, 0});
    }
    poll(polled.data(), polled.size(), patience());
    uint64_t rings = 0;
    [[maybe_unused]] const auto heard = read(wake.get(), &rings, sizeof rings);
    size_t place = 2;
    for (auto client = clients.begin(); client != clients.end(); ++place) {
      const auto each = client++;
      bool goesOn = false;  // nor does it if memory has run out
      attempt([&] { goesOn = step(self, *each, polled[place].revents); });
      if (!goesOn) {
        drop(each);
      }
    }
    if (polled[1].revents != 0) {
      take();
    }
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
    FileDescriptor socket(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        scarceUntil = Clock::now() + milliseconds(kScarceMs);
      }
      return;
    }
    if (host::isOfThisUser(socket.get())) {
      auto& client = clients.emplace_back();
      client.socket = std::move(socket);
      client.until = Clock::now() + kAsking;
    }
  }

  void drop(Clients::iterator client) {
    // Reads what the client has sent: closing a connection with unread input would discard the
    // answer that the client has not read yet.
    char rest[kLongestQuestion];
    for (int i = 0; i < 16 && recv(client->socket.get(), rest, sizeof rest, MSG_DONTWAIT) > 0;
         ++i) {
    }
    // Ends the connection even if a child that was forked meanwhile has it open.
    shutdown(client->socket.get(), SHUT_RDWR);
    clients.erase(client);
  }

  // Advances a client. Returns false if the client is done, or its time is over.
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
        if (client.dump->ready() || now >= client.until ||
            (now >= client.until - kPatience + kPatienceIfHeld && client.dump->gilIsHeld())) {
          answer(client, answered(encode(finished(client, now))), now);
        }
        return true;
      case Phase::awaitsTurn:
        if (!asksJob) {
          beginJob(self, client, now);
        }
        return true;
      case Phase::awaitsJob: {
        LockGuard lock(mutex);
        if (const auto text = std::exchange(done, std::nullopt)) {
          asksJob = false;
          answer(client, *text, now);
        }
        return true;
      }
      case Phase::reads:
        return events != 0 ? tell(client) && client.hasUnsent() : now < client.until;
    }
    return false;
  }

  bool hear(Client& client, Clock::time_point now) {
    char buffer[kLongestQuestion];
    const auto bytes = recv(client.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (bytes <= 0) {
      return bytes < 0 && (errno == EAGAIN || errno == EINTR);
    }
    client.heard.append(buffer, static_cast<size_t>(bytes));
    if (client.heard.find('\n') == std::string::npos) {
      return client.heard.size() < kLongestQuestion;
    }
    if (client.heard == kOfProcess) {
      describe(client, now);
    } else if (const auto job = parseOfJob(client.heard)) {
      client.job = *job;
      client.phase = Client::Phase::awaitsTurn;
      notify();
    } else if (const auto store = parseAboutNews(client.heard)) {
      duties.news(*store);
      return false;
    } else {
      answer(client, refused("this question is not known"), now);
    }
    return true;
  }

  void describe(Client& client, Clock::time_point now) {
    client.description = duties.describe();
    // Shares a dump that Python has not answered: one thread that waits for the GIL is enough.
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
      for (auto& group : groupsOf(status)) {
        for (auto& op : group.ops) {
          told.name(op.wait);
        }
      }
      for (auto& rank : status.ranks) {
        for (auto& counts : rank.counts) {
          told.forgetGone(counts);
        }
      }
    } else {
      status.gilIsHeld = client.dump->gilIsHeld();
      status.pythonSilentMs =
          std::chrono::duration_cast<milliseconds>(now - client.dump->begun()).count();
      status.threads = PythonStackDump::seenWithoutGil();
    }
    client.description.reset();
    return status;
  }

  void beginJob(const std::shared_ptr<State>& self, Client& client, Clock::time_point now) {
    try {
      startDetached("tcpg_job", [self, job = client.job] {
        std::string text;
        attempt([&] {
          try {
            text = answered(self->duties.ofJob(job));
          } catch (const std::exception& error) {
            text = refused(error.what());
          }
        });
        {
          LockGuard lock(self->mutex);
          self->done = std::move(text);
        }
        self->notify();
      });
      asksJob = true;
      client.phase = Client::Phase::awaitsJob;
    } catch (const std::exception& error) {
      answer(client, refused(std::string("no thread can be started: ") + error.what()), now);
    }
  }

  static void answer(Client& client, const std::string& text, Clock::time_point now) {
    client.text += text;
    client.phase = Client::Phase::reads;
    client.until = now + kReading;
  }

  // Sends as much as the connection accepts. Returns false if the connection has failed.
  static bool tell(Client& client) {
    const auto bytes = send(
        client.socket.get(), client.text.data() + client.sent, client.text.size() - client.sent,
        MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes < 0) {
      return errno == EAGAIN || errno == EINTR;
    }
    client.sent += static_cast<size_t>(bytes);
    return true;
  }
};

void StatusServer::setFolder(const std::string& path, GatewayCommand gateway) {
  LockGuard lock(places().mutex);
  places().folder = path;
  places().gateway = std::move(gateway);
}

std::string StatusServer::folder() {
  LockGuard lock(places().mutex);
  return places().folder;
}

std::shared_ptr<StatusServer> StatusServer::of(const Duties& duties) {
  auto& known = slot.get();
  LockGuard lock(known.mutex);
  if (folder().empty()) {
    const auto gateway = gatewayCommand();
    if (!gateway.words.empty()) {
      tellNoRas(
          known, gateway.words.back(),
          "the answer is the status, which TORCHCOMMS_PG_STATUS turns off");
    }
    return nullptr;
  }
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

bool StatusServer::runs() {
  auto& known = slot.get();
  LockGuard lock(known.mutex);
  return !known.server.expired();
}

StatusServer::StatusServer(Duties duties)
    : state_(std::make_shared<State>(std::move(duties), folder())), pid_(host::processId()) {
  static const AtFork atFork;
  state_->wake = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!state_->wake) {
    throw std::runtime_error("no descriptor is free");
  }
  state_->folder.sweep();
  state_->listening = state_->folder.listen();
  try {
    startDetached("tcpg_status", "its status", [state = state_] {
      attempt(startGateway);
      state->run(state);
    });
  } catch (const std::exception&) {
    state_->folder.remove();
    throw;
  }
  ofParent[0] = state_->listening.get();
  ofParent[1] = state_->wake.get();
}

StatusServer::~StatusServer() {
  if (pid_ != host::processId()) {
    return;  // a forked child, whose copy is of the parent's server
  }
  auto& known = slot.get();
  {
    LockGuard lock(known.mutex);
    if (known.latest == this) {
      known.latest = nullptr;
      state_->folder.remove();
      for (auto& descriptor : ofParent) {
        descriptor = -1;
      }
    }
  }
  state_->stop.store(true, std::memory_order_release);
  state_->notify();
}

void StatusServer::add(const Membership& membership) noexcept {
  try {
    state_->folder.add(membership);
  } catch (const std::exception&) {
    // No descriptor is free. Other processes do not learn this rank if this process does not
    // answer.
  }
}

void StatusServer::removeAtExit() noexcept {
  auto& known = slot.get();
  LockGuard lock(known.mutex);
  if (known.latest != nullptr) {
    known.latest->state_->folder.remove();
  }
}

}  // namespace torchcomms_pg::status
