// The head of an HTTP/1.1 request (RFC 9112) from an untrusted peer: strict, since what two parsers read
// differently is how requests are smuggled. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

namespace lm {

// A request that is refused, with the status of the answer.
struct HttpFault : std::runtime_error {
  HttpFault(int status_, const std::string& what) : std::runtime_error(what), status(status_) {}
  int status;
};

struct HttpRequest {
  std::string method;
  std::string path;                            // without the query
  std::map<std::string, std::string> headers;  // names in lower case
  int64_t body_bytes = 0;                      // Content-Length; 0: no body
  bool keep_alive = true;                      // the connection is used again
  bool takes_chunks = true;                    // not with HTTP/1.0
  std::string body = {};                       // read by the server

  // "": not there.
  std::string header(const std::string& name) const;
};

// `head`: the request line and the headers, each line with its CRLF, without the empty line after them.
// Throws HttpFault.
HttpRequest parse_http_head(std::string_view head);

// "Bad Request" and so on.
const char* http_reason(int status);

}  // namespace lm
