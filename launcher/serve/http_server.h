// A small HTTP/1.1 server: a thread for each connection, with limits of size, number and time. It knows
// nothing of what it serves. The owner's thread constructs and destroys it; the handler runs on the
// connections'.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <thread>

#include "launcher/serve/http_request.h"

namespace lm {

struct HttpLimits {
  int64_t head_bytes = 16 << 10;
  int64_t body_bytes = 16 << 20;
  int64_t connections = 64;
  int seconds = 30;  // for a request to arrive, and for the peer to take a part of the answer
};

// The answer to one request: send, or begin_stream and events.
class HttpReply {
 public:
  HttpReply(int socket, int timeout_ms, bool keep_alive, bool chunks = true)
      : socket_(socket), timeout_ms_(timeout_ms), keep_alive_(keep_alive), chunks_(chunks) {}

  void send(int status, const std::string& json);
  // Server-sent events, as chunks; to HTTP/1.0 up to the end of the connection. `data` has no line break.
  void begin_stream();
  void event(const std::string& data);
  void end_stream();
  bool begun() const { return begun_; }
  // The peer has closed the connection, or takes nothing: nobody waits for the answer.
  bool gone();
  // The connection can take another request.
  bool can_go_on() const { return keep_alive_ && !gone_; }

 private:
  void write(const std::string& bytes);

  int socket_, timeout_ms_;
  bool keep_alive_, chunks_, begun_ = false, gone_ = false;
};

class HttpServer {
 public:
  using Handler = std::function<void(const HttpRequest&, HttpReply&)>;

  // Listens on a numeric address; port 0: one that is free. Throws Error(10) "SERVE-10" if it cannot.
  // `fault_body` makes the JSON of an answer to a request that is refused before the handler sees it.
  HttpServer(const std::string& address, int port, const HttpLimits& limits, Handler handler,
             std::function<std::string(const HttpFault&)> fault_body);
  // Closes every connection and waits for the handlers, which HttpReply::gone tells so.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const { return port_; }

 private:
  struct Connection {
    explicit Connection(int at) : socket(at) {}
    int socket;
    std::atomic<bool> ended = false;
    std::thread thread = {};
  };
  class Reader;

  void accept_all();
  void accept_one();
  void forget_ended();
  void serve(int socket);
  // False: the connection ends.
  bool serve_request(Reader& reader, int socket);

  HttpLimits limits_;
  Handler handler_;
  std::function<std::string(const HttpFault&)> fault_body_;
  int listener_ = -1, port_ = 0;
  std::atomic<bool> stopping_ = false;
  std::list<Connection> connections_;  // the accepting thread's, and once that has ended the owner's
  std::thread accepting_;
};

}  // namespace lm
