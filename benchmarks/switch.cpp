// A switch between network devices whose links are not perfect.
//
//   switch DELAY_MS LOSS REORDERED LATER_MS SEED DEVICE...
//
// Forwards each packet that a device receives to the devices that it is for, DELAY_MS later. Drops
// the share LOSS of all packets, and sends the share REORDERED another LATER_MS later, so that
// packets behind them overtake them. Prints "ready" when it forwards, and runs until it is ended.
// A kernel with netem needs no such program (`tc qdisc add dev DEVICE root netem`).

#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <queue>
#include <random>
#include <vector>

#ifndef PACKET_IGNORE_OUTGOING
#define PACKET_IGNORE_OUTGOING 23
#endif

namespace {

using Clock = std::chrono::steady_clock;
using Address = std::array<uint8_t, ETH_ALEN>;

// Has room for one segment: the devices send no longer ones (gso_max_segs 1).
constexpr size_t kLongest = 65536;

[[noreturn]] void fail(const char* what) {
  perror(what);
  exit(1);
}

// Length of the virtio_net_hdr that each packet begins with. It carries a checksum that is not yet
// computed from one device to the other. <linux/virtio_net.h> is no C++: it has a field `class`.
constexpr size_t kHeader = 10;

// A socket for all packets of a device.
int openPort(const char* device) {
  const int port = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  const int room = 16 << 20;
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = static_cast<int>(if_nametoindex(device));
  if (port < 0 || address.sll_ifindex == 0 ||
      setsockopt(port, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) != 0 ||
      setsockopt(port, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) != 0 ||
      setsockopt(port, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room) != 0 ||
      setsockopt(port, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room) != 0 ||
      bind(port, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    fail(device);
  }
  return port;
}

struct Packet {
  Clock::time_point due;
  uint64_t number;  // keeps the order of packets that are due at once
  size_t from;      // the port that received it
  std::vector<uint8_t> bytes;

  bool operator>(const Packet& other) const {
    return due != other.due ? due > other.due : number > other.number;
  }
};

class Switch {
 public:
  Switch(char** arguments, char** devices)
      : delay_(milliseconds(arguments[0])),
        loss_(atof(arguments[1])),
        reordered_(atof(arguments[2])),
        later_(milliseconds(arguments[3])),
        random_(static_cast<uint32_t>(strtoul(arguments[4], nullptr, 10))) {
    for (; *devices != nullptr; ++devices) {
      ports_.push_back({openPort(*devices), POLLIN, 0});
    }
  }

  [[noreturn]] void run() {
    for (;;) {
      const auto wait = timeToNext();
      if (ppoll(ports_.data(), ports_.size(), wait.tv_sec < 0 ? nullptr : &wait, nullptr) < 0) {
        fail("ppoll");
      }
      for (size_t port = 0; port < ports_.size(); ++port) {
        receive(port);
      }
      while (!waiting_.empty() && waiting_.top().due <= Clock::now()) {
        send(waiting_.top());
        waiting_.pop();
      }
    }
  }

 private:
  static Clock::duration milliseconds(const char* text) {
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double, std::milli>(atof(text)));
  }

  // Returns the time until a packet is due; negative if none waits.
  timespec timeToNext() const {
    if (waiting_.empty()) {
      return {-1, 0};
    }
    const auto left = std::max(Clock::duration::zero(), waiting_.top().due - Clock::now());
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    return {seconds.count(), std::chrono::nanoseconds(left - seconds).count()};
  }

  bool happens(double share) { return std::uniform_real_distribution<>(0, 1)(random_) < share; }

  void receive(size_t port) {
    for (;;) {
      const auto length = recv(ports_[port].fd, buffer_.data(), buffer_.size(), 0);
      if (length < static_cast<ssize_t>(kHeader + sizeof(ether_header))) {
        return;
      }
      places_[addressAt(buffer_, offsetof(ether_header, ether_shost))] = port;
      if (happens(loss_)) {
        continue;
      }
      const auto due =
          Clock::now() + delay_ + (happens(reordered_) ? later_ : Clock::duration::zero());
      waiting_.push({due, ++number_, port, {buffer_.data(), buffer_.data() + length}});
    }
  }

  template <class Bytes>
  static Address addressAt(const Bytes& bytes, size_t offset) {
    Address address;
    memcpy(address.data(), &bytes[kHeader + offset], address.size());
    return address;
  }

  // Sends to the port of the receiver, or to all others if it is not known. A full queue drops it.
  void send(const Packet& packet) const {
    const auto place = places_.find(addressAt(packet.bytes, offsetof(ether_header, ether_dhost)));
    for (size_t port = 0; port < ports_.size(); ++port) {
      if (port != packet.from && (place == places_.end() || place->second == port)) {
        (void)!write(ports_[port].fd, packet.bytes.data(), packet.bytes.size());
      }
    }
  }

  const Clock::duration delay_;
  const double loss_;
  const double reordered_;
  const Clock::duration later_;
  std::mt19937 random_;
  std::vector<pollfd> ports_;
  std::map<Address, size_t> places_;
  std::priority_queue<Packet, std::vector<Packet>, std::greater<>> waiting_;
  uint64_t number_ = 0;
  std::array<uint8_t, kLongest> buffer_;
};

}  // namespace

int main(int argc, char** argv) {
  constexpr int kNumbers = 5;
  if (argc < 2 + kNumbers) {
    fprintf(stderr, "usage: switch DELAY_MS LOSS REORDERED LATER_MS SEED DEVICE...\n");
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  static Switch running(argv + 1, argv + 1 + kNumbers);
  puts("ready");
  fflush(stdout);
  running.run();
}
