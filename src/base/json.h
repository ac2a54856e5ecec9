// JSON from untrusted files: size and depth are capped, a key twice in one object is refused, and every error
// is Error(11) "FILE-21" with the place and the byte. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace lm {

using Json = nlohmann::json;

struct JsonLimits {
  int64_t bytes = int64_t{64} << 20;
  int depth = 32;  // nested objects and arrays, the outermost included
};

// `place` (a path, as a rule) names the text in messages.
Json parse_json(std::string_view text, const std::string& place, const JsonLimits& limits = {});
// The same from a regular file (base/file.h).
Json read_json_file(const std::string& path, const JsonLimits& limits = {});

// A whole number of 64 bits. Throws std::runtime_error for any other value: a fraction would be cut, and a
// larger number wrap around.
int64_t json_integer(const Json& value);

// Error(11) about `place` at byte `offset`; also for parsers of their own (safetensors).
[[noreturn]] void fail_json(const std::string& what, const std::string& place, int64_t offset);
// The library takes a NUL for the end of the text and would ignore the rest. `offset` is the text's own.
void refuse_nul(std::string_view text, const std::string& place, int64_t offset);
// Extracts the reason from the library's message: without its tag, and truncated if a hostile token is long.
std::string json_reason(const nlohmann::detail::exception& error);

// Iterates over `text` and counts, so that a callback of the parser has the position.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** position) : at_(at), position_(position) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    if (position_) *position_ = at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** position_;
};

}  // namespace lm
