#include "diagnosis/status/RasAddress.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <stdexcept>

namespace torchcomms_pg::status {

namespace {

// Limit of connections that wait to be accepted.
constexpr int kRasBacklog = 16;

constexpr char kWanted[] = "wanted 127.0.0.1:PORT, localhost:PORT or [::1]:PORT";

struct RasPlace {
  sockaddr_storage address{};
  socklen_t bytes = 0;
};

RasPlace placeOf(const std::string& text) {
  const auto colon = std::min(text.rfind(':'), text.size());
  const auto host = text.substr(0, colon);
  const auto port = text.substr(std::min(colon + 1, text.size()));
  uint16_t number = 0;
  const auto* const end = port.data() + port.size();
  const auto [rest, error] = std::from_chars(port.data(), end, number);
  if (error != std::errc() || rest != end || number == 0) {
    throw std::runtime_error("its port is no number from 1 to 65535; " + std::string(kWanted));
  }
  RasPlace place;
  auto& four = reinterpret_cast<sockaddr_in&>(place.address);
  auto& six = reinterpret_cast<sockaddr_in6&>(place.address);
  const auto name = host == "localhost" ? std::string("127.0.0.1") : host;
  if (inet_pton(AF_INET, name.c_str(), &four.sin_addr) == 1 &&
      ntohl(four.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET) {
    four.sin_family = AF_INET;
    four.sin_port = htons(number);
    place.bytes = sizeof four;
  } else if (host == "[::1]") {
    six.sin6_family = AF_INET6;
    six.sin6_addr = in6addr_loopback;
    six.sin6_port = htons(number);
    place.bytes = sizeof six;
  } else {
    throw std::runtime_error(
        "it is not of this host alone, where anybody might ask; " + std::string(kWanted));
  }
  return place;
}

}  // namespace

FileDescriptor listenForRas(const std::string& address) {
  const auto place = placeOf(address);
  FileDescriptor made(
      socket(place.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  if (!made || setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      setsockopt(made.get(), SOL_SOCKET, SO_REUSEPORT, &yes, sizeof yes) != 0 ||
      bind(made.get(), reinterpret_cast<const sockaddr*>(&place.address), place.bytes) != 0 ||
      listen(made.get(), kRasBacklog) != 0) {
    const int error = errno;
    throw std::runtime_error(
        error == EADDRINUSE ? "another user or program has it; name another port"
                            : std::strerror(error));
  }
  return made;
}

}  // namespace torchcomms_pg::status
