#include "diagnosis/status/LocalProcesses.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "diagnosis/status/Protocol.hpp"
#include "host/Peer.hpp"
#include "host/Process.hpp"

namespace torchcomms_pg::status {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Interval of checks whether the processes without an answer are stopped.
constexpr milliseconds kLook{50};

// A process that is being asked.
struct Asked {
  Entry entry;
  FileDescriptor socket;  // empty if no process listens, or after the answer
  std::string answer = {};
};

bool isStopped(const Entry& entry) {
  return entry.pidSpace == host::pidSpace() && host::processStopped(entry.pid);
}

SilentProcess describeSilent(const Asked& asked, const Folder& folder) {
  const auto& entry = asked.entry;
  const auto pid = std::to_string(entry.pid);
  SilentProcess silent;
  silent.pid = entry.pid;
  silent.memberships = folder.memberships(entry);
  const bool known = entry.pidSpace == host::pidSpace();
  if (known && !host::processAlive(entry.pid, 0)) {
    silent.state = "dead";
    silent.text = "its process is dead (pid " + pid + ")";
  } else if (isStopped(entry)) {
    silent.state = "stopped";
    silent.text = "its process is stopped (pid " + pid +
                  "): by SIGSTOP, or by a debugger; SIGCONT has it go on";
  } else {
    silent.state = "silent";
    silent.text = "did not answer, though its socket is there (pid " + pid +
                  (known ? "" : " of another namespace") + "); see py-spy dump --pid " + pid;
  }
  return silent;
}

// Reads the available bytes of the answer. Returns whether no more will follow.
bool readSome(Asked& asked) {
  char buffer[65536];
  for (;;) {
    const auto bytes = recv(asked.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (bytes < 0) {
      return errno != EAGAIN && errno != EINTR;
    }
    if (bytes == 0 || asked.answer.size() + bytes > kLongestAnswer) {
      return true;
    }
    asked.answer.append(buffer, static_cast<size_t>(bytes));
  }
}

}  // namespace

std::string ownPlace() {
  return Peer::self().place();
}

HostStatus gather(const Folder& folder, milliseconds patience) {
  const auto until = Clock::now() + patience;
  std::vector<Asked> all;
  for (const auto& entry : folder.entries()) {
    auto& asked = all.emplace_back(Asked{entry, folder.connect(entry)});
    if (asked.socket &&
        send(asked.socket.get(), kOfProcess, sizeof kOfProcess - 1, MSG_NOSIGNAL) < 0) {
      asked.socket = FileDescriptor();  // the process's backlog is full
    }
  }
  for (;;) {
    std::vector<pollfd> polled;
    for (const auto& asked : all) {
      polled.push_back({asked.socket.get(), POLLIN, 0});  // poll ignores an empty one
    }
    const auto mayAnswer = [](const auto& asked) {
      return asked.socket && !isStopped(asked.entry);
    };
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
    if (std::ranges::none_of(all, mayAnswer) || left.count() <= 0) {
      break;
    }
    poll(polled.data(), polled.size(), static_cast<int>(std::min(left, kLook).count()));
    for (size_t i = 0; i < all.size(); ++i) {
      if (polled[i].revents != 0 && readSome(all[i])) {
        all[i].socket = FileDescriptor();
      }
    }
  }
  HostStatus status;
  status.host = ownPlace();
  for (const auto& asked : all) {
    const auto body = bodyOf(asked.answer);
    if (auto process = body ? decodeProcess(*body) : std::nullopt) {
      status.processes.push_back(std::move(*process));
    } else {
      status.silent.push_back(describeSilent(asked, folder));
    }
  }
  return status;
}

}  // namespace torchcomms_pg::status
