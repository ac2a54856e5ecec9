#include "launcher/machine/interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>

namespace lm {
namespace {

bool same_address(const sockaddr& a, const sockaddr& b) {
  if (a.sa_family != b.sa_family) return false;
  if (a.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return a.sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

// The address of this machine that packets to `to` would come from: connecting a datagram socket asks the
// kernel's routes and sends nothing.
bool own_address_towards(const addrinfo& to, sockaddr_storage* out) {
  const int fd = socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  socklen_t size = sizeof *out;
  const bool known = connect(fd, to.ai_addr, to.ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(out), &size) == 0;
  close(fd);
  return known;
}

}  // namespace

std::string interface_towards(const std::string& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> to(found, &freeaddrinfo);
  sockaddr_storage own{};
  if (!own_address_towards(*to, &own)) return "";
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(all, &freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    if (same_address(*one->ifa_addr, reinterpret_cast<const sockaddr&>(own))) return one->ifa_name;
  }
  return "";
}

}  // namespace lm
