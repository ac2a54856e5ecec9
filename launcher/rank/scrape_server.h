// Serves a text by HTTP to Prometheus: a socket and one request after another, each with a short deadline.
// It is no server for the internet, and by default listens on loopback. The owner's thread calls `serve`.
#pragma once

#include <functional>
#include <string>

namespace lm {

class ScrapeServer {
 public:
  // `address`: as log.prometheus has it. Throws Error(12) if nothing can listen there.
  explicit ScrapeServer(const std::string& address);
  ~ScrapeServer();
  ScrapeServer(const ScrapeServer&) = delete;
  ScrapeServer& operator=(const ScrapeServer&) = delete;

  // "http://127.0.0.1:9400/metrics", with the port that was chosen.
  const std::string& url() const { return url_; }
  // Waits up to `milliseconds` for a request, and answers it with what `text` returns.
  void serve(int milliseconds, const std::function<std::string()>& text) const;

 private:
  int socket_ = -1;
  std::string url_;
};

}  // namespace lm
