// "127.0.0.1:9400" and "[::1]:9400": a numeric address and a port, as log.prometheus names them. Pure.
#pragma once

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>

namespace lm {

struct ListenAddress {
  std::string host;  // without brackets
  int port = 0;      // 0: any free one
  bool v6 = false;
};

// Text that is not the path of a file: no slash, and a colon.
inline bool means_address(const std::string& text) {
  return text.find('/') == std::string::npos && text.find(':') != std::string::npos;
}

// nullopt unless it is a numeric address with a port. A name would have to be looked up, and may have several
// addresses.
inline std::optional<ListenAddress> listen_address(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return std::nullopt;
  ListenAddress out{.host = text.substr(0, colon)};
  const char *begin = text.data() + colon + 1, *end = text.data() + text.size();
  const auto [read, error] = std::from_chars(begin, end, out.port);
  if (error != std::errc() || read != end || out.port < 0 || out.port > 65535) return std::nullopt;
  out.v6 = out.host.starts_with('[') && out.host.ends_with(']');
  if (out.v6) out.host = out.host.substr(1, out.host.size() - 2);
  unsigned char bytes[16];
  if (inet_pton(out.v6 ? AF_INET6 : AF_INET, out.host.c_str(), bytes) != 1) return std::nullopt;
  return out;
}

}  // namespace lm
