#include "launcher/worker/scrape_server.h"

#include <fmt/format.h>

#include <utility>

#include "base/error.h"
#include "config/listen_address.h"

namespace lm {
namespace {

constexpr const char* kPlain = "text/plain; charset=utf-8";
// A scrape has a small head and no body. Only Prometheus asks, and perhaps a person.
constexpr HttpLimits kLimits = {.head_bytes = 8192, .body_bytes = 0, .connections = 8, .seconds = 2};

void answer(const HttpRequest& request, HttpReply& reply, const std::function<std::string()>& text) {
  if (request.path != "/metrics" && request.path != "/") throw HttpFault(404, "see /metrics");
  if (request.method != "GET") throw HttpFault(405, "GET alone");
  reply.send(200, text(), "text/plain; version=0.0.4; charset=utf-8");
}

}  // namespace

ScrapeServer::ScrapeServer(const std::string& address, std::function<std::string()> text) {
  const auto at = listen_address(address);
  LM_CHECK(at.has_value(), address);
  try {
    server_ = std::make_unique<HttpServer>(
        at->host, at->port, kLimits,
        [text = std::move(text)](const HttpRequest& request, HttpReply& reply) {
          answer(request, reply, text);
        },
        [](const HttpFault& fault) {
          return HttpBody{fault.what() + std::string("\n"), kPlain};
        });
  } catch (const CannotListen& failure) {
    throw Error(Exit::kDoesNotFit, {.area = "PROM-40",
                                    .what = failure.what(),
                                    .place = "log.prometheus = \"" + address + "\"",
                                    .next = "give another port, port 0 for a free one, or a file's path"});
  }
  url_ = fmt::format(fmt::runtime(at->v6 ? "http://[{}]:{}/metrics" : "http://{}:{}/metrics"), at->host,
                     server_->port());
}

}  // namespace lm
