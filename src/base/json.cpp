#include "base/json.h"

#include <fmt/format.h>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace lm {
namespace {

// Builds the document; the library's own builder would let the last of two equal keys win.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(const char* begin, const char** position, const std::string& place, int depth)
      : begin_(begin), position_(position), place_(place), depth_(depth) {}

  Json take() { return std::move(root_); }

  bool null() override { return add(Json()), true; }
  bool boolean(bool value) override { return add(Json(value)), true; }
  bool number_integer(number_integer_t value) override { return add(Json(value)), true; }
  bool number_unsigned(number_unsigned_t value) override { return add(Json(value)), true; }
  bool number_float(number_float_t value, const string_t&) override { return add(Json(value)), true; }
  bool string(string_t& value) override { return add(Json(std::move(value))), true; }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()), true; }
  bool start_array(std::size_t) override { return open(Json::array()), true; }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    if (open_.back()->contains(name)) {
      fail_json("the key \"" + name.substr(0, 100) + "\" appears twice in one object", place_, offset());
    }
    key_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    fail_json(json_reason(error), place_, static_cast<int64_t>(position));
  }

 private:
  int64_t offset() const { return *position_ - begin_; }
  Json* add(Json&& value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    return &(parent[key_] = std::move(value));
  }
  void open(Json&& value) {
    if (static_cast<int>(open_.size()) >= depth_) {
      fail_json(fmt::format("nested deeper than {} levels", depth_), place_, offset());
    }
    open_.push_back(add(std::move(value)));
  }

  const char* begin_;
  const char** position_;
  const std::string& place_;
  int depth_;
  Json root_;
  // The containers being filled, outermost first. Stable: a parent does not grow while its last child is
  // open.
  std::vector<Json*> open_;
  std::string key_;
};

}  // namespace

Json parse_json(std::string_view text, const std::string& place, const JsonLimits& limits) {
  if (static_cast<int64_t>(text.size()) > limits.bytes) {
    fail_json(fmt::format("the text has {} bytes, at most {} are accepted", text.size(), limits.bytes), place,
              0);
  }
  refuse_nul(text, place, 0);
  const char* position = text.data();
  const CountingIterator begin(text.data(), &position), end(text.data() + text.size(), nullptr);
  Builder builder(text.data(), &position, place, limits.depth);
  Json::sax_parse(begin, end, &builder);
  return builder.take();
}

Json read_json_file(const std::string& path, const JsonLimits& limits) {
  return parse_json(read_small_file(path, limits.bytes), path, limits);
}

int64_t json_integer(const Json& value) {
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX))
    throw std::runtime_error("a number that is not a 64-bit integer");
  return value.get<int64_t>();
}

void fail_json(const std::string& what, const std::string& place, int64_t offset) {
  throw Error(Exit::kInput, {.area = "FILE-21",
                             .what = what,
                             .place = fmt::format("{}, byte {}", place, offset),
                             .next = "the file is damaged or not what its name says: get it again"});
}

void refuse_nul(std::string_view text, const std::string& place, int64_t offset) {
  const size_t at = text.find('\0');
  if (at != std::string_view::npos) fail_json("a NUL byte", place, offset + static_cast<int64_t>(at));
}

std::string json_reason(const nlohmann::detail::exception& error) {
  std::string text = error.what();
  const size_t tag = text.find("] ");
  if (tag != std::string::npos) text.erase(0, tag + 2);
  constexpr size_t kMost = 300;
  if (text.size() > kMost) text = text.substr(0, kMost) + "…";
  return text;
}

}  // namespace lm
