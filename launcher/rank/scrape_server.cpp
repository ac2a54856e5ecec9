#include "launcher/rank/scrape_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "config/listen_address.h"
#include "launcher/rank/prometheus_text.h"

namespace lm {
namespace {

// A request's head is longer than that only from something that is not Prometheus.
constexpr size_t kMostHead = 8192;
// For a whole request and its answer: a slow peer keeps another scrape waiting for so long.
constexpr double kSeconds = 2;

Error cannot_listen(const std::string& address, int reason) {
  return Error(Exit::kDoesNotFit, {.area = "PROM-40",
                                   .what = std::string("cannot listen: ") + std::strerror(reason),
                                   .place = "log.prometheus = \"" + address + "\"",
                                   .next = "give another port, port 0 for a free one, or a file's path"});
}

// Whether the socket is ready before `until`.
bool ready(int fd, short events, double until) {
  pollfd wait{fd, events, 0};
  const double left = until - monotonic_seconds();
  return left > 0 && poll(&wait, 1, static_cast<int>(left * 1000) + 1) > 0;
}

std::string read_head(int fd, double until) {
  std::string head;
  char bytes[1024];
  while (head.find("\r\n\r\n") == std::string::npos && head.size() <= kMostHead && ready(fd, POLLIN, until)) {
    const ssize_t n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return "";
    if (n > 0) head.append(bytes, static_cast<size_t>(n));
  }
  return head;
}

void write_answer(int fd, const std::string& text, double until) {
  for (size_t done = 0; done < text.size() && ready(fd, POLLOUT, until);) {
    const ssize_t n = send(fd, text.data() + done, text.size() - done, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return;
    if (n > 0) done += static_cast<size_t>(n);
  }
}

}  // namespace

ScrapeServer::ScrapeServer(const std::string& address) {
  const auto parsed = listen_address(address);
  LM_CHECK(parsed.has_value(), address);
  sockaddr_in6 v6{};
  sockaddr_in v4{};
  v6.sin6_family = AF_INET6, v6.sin6_port = htons(static_cast<uint16_t>(parsed->port));
  v4.sin_family = AF_INET, v4.sin_port = htons(static_cast<uint16_t>(parsed->port));
  inet_pton(AF_INET6, parsed->host.c_str(), &v6.sin6_addr);
  inet_pton(AF_INET, parsed->host.c_str(), &v4.sin_addr);
  auto* const own = parsed->v6 ? reinterpret_cast<sockaddr*>(&v6) : reinterpret_cast<sockaddr*>(&v4);
  socklen_t size = parsed->v6 ? sizeof v6 : sizeof v4;
  socket_ = socket(own->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int yes = 1;
  if (socket_ < 0 || setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      bind(socket_, own, size) != 0 || listen(socket_, 16) != 0 || getsockname(socket_, own, &size) != 0) {
    const int reason = errno;
    if (socket_ >= 0) close(socket_);
    throw cannot_listen(address, reason);
  }
  const int port = ntohs(parsed->v6 ? v6.sin6_port : v4.sin_port);
  url_ = fmt::format(fmt::runtime(parsed->v6 ? "http://[{}]:{}/metrics" : "http://{}:{}/metrics"),
                     parsed->host, port);
}

ScrapeServer::~ScrapeServer() {
  close(socket_);
}

void ScrapeServer::serve(int milliseconds, const std::function<std::string()>& text) const {
  pollfd wait{socket_, POLLIN, 0};
  if (poll(&wait, 1, milliseconds) <= 0) return;
  const int peer = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (peer < 0) return;
  const double until = monotonic_seconds() + kSeconds;
  const std::string head = read_head(peer, until);
  if (!head.empty()) {
    const size_t end = head.find("\r\n\r\n");
    const Scrape scrape = end == std::string::npos ? Scrape::kMalformed : scrape_of(head.substr(0, end));
    const bool asks = scrape == Scrape::kMetrics || scrape == Scrape::kHead;
    write_answer(peer, scrape_answer(scrape, asks ? text() : ""), until);
    shutdown(peer, SHUT_WR);
  }
  close(peer);
}

}  // namespace lm
