#include "launcher/serve/http_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr double kDrainSeconds = 2;
constexpr int kPollMs = 100;  // so often a wait looks whether the server stops

std::string head_of(int status, const std::string& type, bool keep_alive) {
  return fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nCache-Control: no-store\r\nConnection: {}\r\n",
                     status, http_reason(status), type, keep_alive ? "keep-alive" : "close");
}

Error cannot_listen(const std::string& address, int port, const std::string& why) {
  return Error(Exit::kConfig, {.area = "SERVE-10",
                               .what = fmt::format("cannot listen on {} port {}: {}", address, port, why),
                               .place = "the command line",
                               .next = "choose another --port or --host"});
}

struct Address {
  sockaddr_storage bytes = {};
  socklen_t size = 0;
};

std::optional<Address> numeric_address(const std::string& text, int port) {
  Address out;
  auto* const four = reinterpret_cast<sockaddr_in*>(&out.bytes);
  auto* const six = reinterpret_cast<sockaddr_in6*>(&out.bytes);
  if (inet_pton(AF_INET, text.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(static_cast<uint16_t>(port));
    out.size = sizeof(sockaddr_in);
  } else if (inet_pton(AF_INET6, text.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<uint16_t>(port));
    out.size = sizeof(sockaddr_in6);
  } else {
    return std::nullopt;
  }
  return out;
}

int port_of(int socket) {
  Address bound;
  bound.size = sizeof(bound.bytes);
  getsockname(socket, reinterpret_cast<sockaddr*>(&bound.bytes), &bound.size);
  return ntohs(bound.bytes.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&bound.bytes)->sin_port
                                                : reinterpret_cast<sockaddr_in6*>(&bound.bytes)->sin6_port);
}

}  // namespace

void HttpReply::write(const std::string& bytes) {
  const double end = monotonic_seconds() + timeout_ms_ / 1000.0;
  for (size_t done = 0; done < bytes.size() && !gone_;) {
    const ssize_t n = ::send(socket_, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      pollfd wait{.fd = socket_, .events = POLLOUT, .revents = 0};
      ::poll(&wait, 1, kPollMs);
      gone_ = monotonic_seconds() > end;
    } else {
      gone_ = true;
    }
  }
}

void HttpReply::send(int status, const std::string& json) {
  begun_ = true;
  write(fmt::format("{}Content-Length: {}\r\n\r\n", head_of(status, "application/json", keep_alive_),
                    json.size()) +
        json);
}

void HttpReply::begin_stream() {
  begun_ = true;
  write(head_of(200, "text/event-stream", keep_alive_) +
        (chunks_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n"));
}

void HttpReply::event(const std::string& data) {
  const std::string text = "data: " + data + "\n\n";
  write(chunks_ ? fmt::format("{:x}\r\n{}\r\n", text.size(), text) : text);
}

void HttpReply::end_stream() {
  if (chunks_) write("0\r\n\r\n");
}

bool HttpReply::gone() {
  char byte = 0;
  const ssize_t n = ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) gone_ = true;
  return gone_;
}

// Reads a connection's requests; what is behind one belongs to the next.
class HttpServer::Reader {
 public:
  Reader(int socket, const HttpLimits& limits, const std::atomic<bool>& stopping)
      : socket_(socket), limits_(limits), stopping_(stopping) {}

  // Nothing: the peer has closed the connection, or has sent nothing in time.
  std::optional<HttpRequest> next() {
    end_ = monotonic_seconds() + limits_.seconds;
    size_t end = 0;
    while ((end = bytes_.find("\r\n\r\n")) == std::string::npos) {
      if (static_cast<int64_t>(bytes_.size()) > limits_.head_bytes)
        throw HttpFault(431, "the head is too large");
      if (!more()) return std::nullopt;
    }
    if (static_cast<int64_t>(end) > limits_.head_bytes) throw HttpFault(431, "the head is too large");
    HttpRequest request = parse_http_head(std::string_view(bytes_).substr(0, end + 2));
    bytes_.erase(0, end + 4);
    read_body(request);
    return request;
  }

  // Reads on after an answer to a request that has not arrived whole: a peer that still sends would get a
  // reset in place of the answer.
  void drain() {
    ::shutdown(socket_, SHUT_WR);
    bytes_.clear();
    end_ = monotonic_seconds() + kDrainSeconds;
    try {
      for (int64_t read = 0; read < 2 * limits_.body_bytes && more(); bytes_.clear())
        read += std::ssize(bytes_);
    } catch (const HttpFault&) {
    }
  }

 private:
  void read_body(HttpRequest& request) {
    if (request.body_bytes > limits_.body_bytes)
      throw HttpFault(413, fmt::format("the body has {} bytes, at most {} are taken", request.body_bytes,
                                       limits_.body_bytes));
    if (request.body_bytes > 0 && request.header("expect") == "100-continue")
      static_cast<void>(::send(socket_, "HTTP/1.1 100 Continue\r\n\r\n", 25, MSG_NOSIGNAL));
    const auto wanted = static_cast<size_t>(request.body_bytes);
    while (bytes_.size() < wanted) {
      if (!more()) throw HttpFault(400, "the body is shorter than Content-Length says");
    }
    request.body = bytes_.substr(0, wanted);
    bytes_.erase(0, wanted);
  }

  // False at the end of the connection.
  bool more() {
    while (!stopping_) {
      pollfd wait{.fd = socket_, .events = POLLIN, .revents = 0};
      const int ready = ::poll(&wait, 1, kPollMs);
      if (ready == 0 || (ready < 0 && errno == EINTR)) {
        if (monotonic_seconds() <= end_) continue;
        if (bytes_.empty()) return false;
        throw HttpFault(408, fmt::format("the request has not arrived within {} s", limits_.seconds));
      }
      char part[16384];
      const ssize_t n = ::recv(socket_, part, sizeof part, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (n <= 0) return false;
      bytes_.append(part, static_cast<size_t>(n));
      return true;
    }
    return false;
  }

  int socket_;
  const HttpLimits& limits_;
  const std::atomic<bool>& stopping_;
  std::string bytes_;
  double end_ = 0;  // of the time that the request has
};

HttpServer::HttpServer(const std::string& address, int port, const HttpLimits& limits, Handler handler,
                       std::function<std::string(const HttpFault&)> fault_body)
    : limits_(limits), handler_(std::move(handler)), fault_body_(std::move(fault_body)) {
  const std::optional<Address> at = numeric_address(address, port);
  if (!at) throw cannot_listen(address, port, "it is no numeric address such as 127.0.0.1");
  listener_ = ::socket(at->bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int on = 1;
  if (listener_ >= 0) setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (listener_ < 0 || ::bind(listener_, reinterpret_cast<const sockaddr*>(&at->bytes), at->size) != 0 ||
      ::listen(listener_, 64) != 0) {
    const std::string why = std::strerror(errno);
    if (listener_ >= 0) ::close(listener_);
    throw cannot_listen(address, port, why);
  }
  port_ = port_of(listener_);
  accepting_ = std::thread([this] { accept_all(); });
}

HttpServer::~HttpServer() {
  stopping_ = true;
  accepting_.join();
  ::close(listener_);
  for (Connection& one : connections_) ::shutdown(one.socket, SHUT_RDWR);
  for (Connection& one : connections_) {
    one.thread.join();
    ::close(one.socket);
  }
}

void HttpServer::accept_all() {
  while (!stopping_) {
    pollfd wait{.fd = listener_, .events = POLLIN, .revents = 0};
    if (::poll(&wait, 1, kPollMs) > 0) accept_one();
    forget_ended();
  }
}

void HttpServer::accept_one() {
  const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (socket < 0) return;
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // an event is a small packet
  if (static_cast<int64_t>(connections_.size()) >= limits_.connections) {
    HttpReply(socket, kPollMs, false)
        .send(503, fault_body_(HttpFault(503, fmt::format("{} connections are open", limits_.connections))));
    ::close(socket);
    return;
  }
  Connection& one = connections_.emplace_back(socket);
  one.thread = std::thread([this, &one] {
    serve(one.socket);
    one.ended = true;
  });
}

void HttpServer::forget_ended() {
  for (auto one = connections_.begin(); one != connections_.end();) {
    if (!one->ended) {
      ++one;
      continue;
    }
    one->thread.join();
    ::close(one->socket);
    one = connections_.erase(one);
  }
}

void HttpServer::serve(int socket) {
  Reader reader(socket, limits_, stopping_);
  while (!stopping_ && serve_request(reader, socket)) {
  }
  // The peer sees the end now, not only when the accepting thread has closed the socket.
  ::shutdown(socket, SHUT_RDWR);
}

bool HttpServer::serve_request(Reader& reader, int socket) {
  const int timeout_ms = limits_.seconds * 1000;
  try {
    const std::optional<HttpRequest> request = reader.next();
    if (!request) return false;
    HttpReply reply(socket, timeout_ms, request->keep_alive, request->takes_chunks);
    try {
      handler_(*request, reply);
    } catch (const HttpFault& fault) {
      if (reply.begun()) return false;
      reply.send(fault.status, fault_body_(fault));
    } catch (const std::exception& error) {
      if (reply.begun()) return false;
      reply.send(500, fault_body_(HttpFault(500, error.what())));
    }
    return reply.can_go_on();
  } catch (const HttpFault& fault) {
    // Where the request ends is not known: the connection cannot be used again.
    HttpReply(socket, timeout_ms, false).send(fault.status, fault_body_(fault));
    reader.drain();
    return false;
  }
}

}  // namespace lm
