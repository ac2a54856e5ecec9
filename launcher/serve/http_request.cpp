#include "launcher/serve/http_request.h"

#include <algorithm>
#include <charconv>

namespace lm {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr size_t kMostHeaders = 100;

[[noreturn]] void refuse(const std::string& what) {
  throw HttpFault(400, what);
}

bool is_token(std::string_view text) {
  const auto valid = [](char c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    return letter || std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
  };
  return !text.empty() && std::ranges::all_of(text, valid);
}

bool is_printed(char c) {
  return c > 0x20 && c < 0x7f;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

std::string_view without_blanks(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// The next line of `rest`, which becomes what is behind it.
std::string_view take_line(std::string_view& rest) {
  const size_t end = rest.find(kLineEnd);
  if (end == std::string_view::npos) refuse("a line of the head has no end");
  const std::string_view line = rest.substr(0, end);
  rest.remove_prefix(end + kLineEnd.size());
  const auto control = [](char c) {
    return (static_cast<unsigned char>(c) < 0x20 && c != '\t') || c == 0x7f;
  };
  if (std::ranges::any_of(line, control)) refuse("a control character in the head");
  return line;
}

void read_request_line(std::string_view line, HttpRequest& out) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) refuse("the request line is no HTTP request");
  const std::string_view target = line.substr(first + 1, last - first - 1), version = line.substr(last + 1);
  out.method = line.substr(0, first);
  if (!is_token(out.method)) refuse("the request's method is no token");
  if (target.empty() || target[0] != '/' || !std::ranges::all_of(target, is_printed))
    refuse("the request's target is no path");
  out.path = target.substr(0, target.find('?'));
  if (version == "HTTP/1.0") {
    out.keep_alive = out.takes_chunks = false;
  } else if (version != "HTTP/1.1") {
    throw HttpFault(505, "the server speaks HTTP/1.1");
  }
}

void read_header(std::string_view line, HttpRequest& out) {
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) refuse("a header has no name");
  if (out.headers.size() >= kMostHeaders) throw HttpFault(431, "too many headers");
  const std::string name = lower(line.substr(0, colon));
  const auto [place, fresh] = out.headers.emplace(name, without_blanks(line.substr(colon + 1)));
  if (fresh) return;
  if (name == "content-length" || name == "host" || name == "authorization" || name == "content-type")
    refuse("the header " + name + " is there twice");
  place->second += ", " + std::string(without_blanks(line.substr(colon + 1)));
}

void read_length(HttpRequest& out) {
  if (out.headers.contains("transfer-encoding"))
    throw HttpFault(501, "a body has a Content-Length here, no Transfer-Encoding");
  const auto length = out.headers.find("content-length");
  if (length == out.headers.end()) return;
  const std::string& text = length->second;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  if (text.empty() || text.size() > 15 || !std::ranges::all_of(text, digit))
    refuse("Content-Length is no number of bytes");
  std::from_chars(text.data(), text.data() + text.size(), out.body_bytes);
}

}  // namespace

std::string HttpRequest::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

HttpRequest parse_http_head(std::string_view head) {
  HttpRequest out;
  read_request_line(take_line(head), out);
  while (!head.empty()) read_header(take_line(head), out);
  read_length(out);
  if (out.takes_chunks && !out.headers.contains("host")) refuse("the header host is missing");
  const std::string connection = lower(out.header("connection"));
  if (connection.find("close") != std::string::npos) out.keep_alive = false;
  return out;
}

const char* http_reason(int status) {
  switch (status) {
    case 100:
      return "Continue";
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Internal Server Error";
  }
}

}  // namespace lm
