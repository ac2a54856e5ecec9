// Serves a run's state by HTTP to Prometheus. It is no server for the internet, and by default listens on
// loopback.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "launcher/serve/http_server.h"

namespace lm {

class ScrapeServer {
 public:
  // `address`: as log.prometheus has it. `text` is called on the connections' threads, several at once, until
  // the destructor returns. Throws Error(12) if nothing can listen there.
  ScrapeServer(const std::string& address, std::function<std::string()> text);

  // "http://127.0.0.1:9400/metrics", with the port that was chosen.
  const std::string& url() const { return url_; }
  int port() const { return server_->port(); }

 private:
  std::unique_ptr<HttpServer> server_;
  std::string url_;
};

}  // namespace lm
