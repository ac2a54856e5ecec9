// Any bytes as JSON: refused with Error(11), or the document equals the library's own, no key appears twice,
// the nesting is bounded, and it survives its text; as a file, and within smaller limits, it is the same or
// refused; its whole numbers of 64 bits are told from the others.
#include "base/json.h"

#include "tests/fuzz/support.h"

namespace {

void check_number(const lm::Json& value) {
  bool whole = true;
  try {
    lm::fuzz::require(value == lm::json_integer(value));
  } catch (const std::runtime_error&) {
    whole = false;
  }
  lm::fuzz::require(whole == (value.is_number_integer() &&
                              !(value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX)));
}

// Keys of all objects, and the deepest nesting.
void measure(const lm::Json& value, int depth, size_t& keys, int& deepest) {
  if (!value.is_structured()) return check_number(value);
  deepest = std::max(deepest, depth);
  if (value.is_object()) keys += value.size();
  for (const lm::Json& inner : value) measure(inner, depth + 1, keys, deepest);
}

void check(const lm::Json& value, std::string_view text) {
  using lm::fuzz::require;
  size_t keys = 0, read = 0;
  int deepest = 0;
  measure(value, 1, keys, deepest);
  const lm::Json library = lm::Json::parse(text, [&](int, lm::Json::parse_event_t event, lm::Json&) {
    read += event == lm::Json::parse_event_t::key;
    return true;
  });
  require(value == library && keys == read && deepest <= 32 && text.find('\0') == text.npos);
  require(lm::parse_json(value.dump(), "dump") == value);
  static lm::fuzz::MemoryFile file;
  file.set({text});
  require(lm::read_json_file(file.path()) == value);
  constexpr lm::JsonLimits kFew = {.bytes = 16, .depth = 2};
  const auto small = lm::fuzz::parse(lm::Exit::kInput, [&] { return lm::parse_json(text, "few", kFew); });
  require(small ? *small == value : std::ssize(text) > kFew.bytes || deepest > kFew.depth);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = lm::fuzz::text_of(data, size);
  const auto value = lm::fuzz::parse(lm::Exit::kInput, [&] { return lm::parse_json(text, "fuzz"); });
  if (value) check(*value, text);
  return 0;
}
