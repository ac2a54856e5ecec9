#include "weights/safetensors_header.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/json.h"

namespace lm {
namespace {

constexpr std::pair<const char*, DType> kDtypes[] = {
    {"F64", DType::kF64}, {"F32", DType::kF32},  {"F16", DType::kF16}, {"BF16", DType::kBF16},
    {"I64", DType::kI64}, {"I32", DType::kI32},  {"I16", DType::kI16}, {"I8", DType::kI8},
    {"U8", DType::kU8},   {"BOOL", DType::kBool}};

std::string in_quotes(const std::string& name) {
  return "\"" + (name.size() > 200 ? name.substr(0, 200) + "…" : name) + "\"";
}

// The text as a stream that counts the bytes read.
class Stream {
 public:
  Stream(const HeaderText& next, const std::string& place) : next_(next), place_(place) { refill(); }
  bool at_end() const { return piece_.empty(); }
  const char& front() const { return piece_.front(); }
  int64_t position() const { return position_; }
  void advance() {
    ++position_;
    piece_.remove_prefix(1);
    if (piece_.empty()) refill();
  }

 private:
  void refill() {
    piece_ = next_();
    refuse_nul(piece_, place_, 8 + position_);
  }

  const HeaderText& next_;
  const std::string& place_;
  std::string_view piece_;
  int64_t position_ = 0;
};

// The library's input iterator: single-pass, all copies share the stream.
class StreamIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  explicit StreamIterator(Stream* stream) : stream_(stream) {}  // null: the end
  reference operator*() const { return stream_->front(); }
  StreamIterator& operator++() { return stream_->advance(), *this; }
  void operator++(int) { stream_->advance(); }
  bool operator==(const StreamIterator& other) const { return at_end() == other.at_end(); }
  bool operator!=(const StreamIterator& other) const { return at_end() != other.at_end(); }

 private:
  bool at_end() const { return !stream_ || stream_->at_end(); }
  Stream* stream_;
};

// Fills the entries while it reads the text: no document is built, so a header costs its own size plus the
// result. The grammar has exactly three levels; `state_` is the position in it.
class Parser : public nlohmann::json_sax<Json> {
 public:
  Parser(const Stream& stream, const std::string& place) : stream_(stream), place_(place) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { fail_value("null"); }
  bool boolean(bool) override { fail_value("true or false"); }
  bool binary(binary_t&) override { fail_value("binary"); }
  bool number_float(number_float_t, const string_t&) override {
    fail_value("a number that is not an integer");
  }
  bool number_integer(number_integer_t) override { fail_value("a negative number"); }
  bool number_unsigned(number_unsigned_t value) override;
  bool string(string_t& value) override;
  bool start_object(std::size_t) override;
  bool key(string_t& name) override;
  bool end_object() override;
  bool start_array(std::size_t) override;
  bool end_array() override;
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    fail_json("header: " + json_reason(error), place_, 8 + static_cast<int64_t>(position));
  }

 private:
  enum class State { kStart, kRoot, kRootValue, kMetadata, kTensor, kDtype, kShape, kOffsets, kEnd };

  [[noreturn]] void fail(const std::string& what) const { fail_json(what, place_, 8 + stream_.position()); }
  [[noreturn]] void fail_tensor(const std::string& what) const {
    fail("tensor " + in_quotes(entry_.name) + ": " + what);
  }
  [[noreturn]] void fail_value(const std::string& found) const;

  const Stream& stream_;
  const std::string& place_;
  SafetensorsHeader header_;
  State state_ = State::kStart;
  bool in_array_ = false;
  bool metadata_seen_ = false;
  std::string metadata_key_;
  SafetensorsEntry entry_;
  bool has_dtype_ = false, has_shape_ = false;
  int offsets_ = -1;  // numbers read of data_offsets; -1: key not seen
};

void Parser::fail_value(const std::string& found) const {
  switch (state_) {
    case State::kStart:
      fail("the header must be an object, not " + found);
    case State::kRootValue:
      fail("the entry of " + in_quotes(entry_.name) + " must be an object, not " + found);
    case State::kMetadata:
      fail("__metadata__ must map strings to strings, not to " + found);
    case State::kDtype:
      fail_tensor("dtype must be a string, not " + found);
    case State::kShape:
      fail_tensor("shape must be a list of sizes, not " + found);
    case State::kOffsets:
      fail_tensor("data_offsets must be two sizes, not " + found);
    default:
      fail("unexpected " + found);
  }
}

bool Parser::number_unsigned(number_unsigned_t value) {
  if (!in_array_) fail_value("a number");
  if (value > static_cast<uint64_t>(INT64_MAX)) fail_value(fmt::format("the size {}", value));
  const auto size = static_cast<int64_t>(value);
  if (state_ == State::kShape) {
    if (static_cast<int64_t>(entry_.shape.size()) >= kMostDimensions) {
      fail_tensor(fmt::format("more than {} dimensions", kMostDimensions));
    }
    entry_.shape.push_back(size);
  } else {
    if (offsets_ == 2) fail_value("more");
    (offsets_ == 0 ? entry_.begin : entry_.end) = size;
    ++offsets_;
  }
  return true;
}

bool Parser::string(string_t& value) {
  if (state_ == State::kMetadata && metadata_seen_) {
    header_.metadata[metadata_key_] = std::move(value);
    return true;
  }
  if (state_ != State::kDtype) fail_value("a string");
  if (!parse_safetensors_dtype(value, &entry_.dtype)) {
    fail_tensor("the dtype " + in_quotes(value.substr(0, 50)) + " is not supported");
  }
  has_dtype_ = true;
  state_ = State::kTensor;
  return true;
}

bool Parser::start_object(std::size_t) {
  if (state_ == State::kStart) {
    state_ = State::kRoot;
  } else if (state_ == State::kRootValue) {
    state_ = State::kTensor;
    has_dtype_ = has_shape_ = false;
    offsets_ = -1;
  } else if (state_ == State::kMetadata && !metadata_seen_) {
    metadata_seen_ = true;
  } else {
    fail_value("an object");
  }
  return true;
}

bool Parser::key(string_t& name) {
  if (state_ == State::kRoot) {
    if (static_cast<int64_t>(name.size()) > kMostNameBytes) {
      fail(fmt::format("a name of {} bytes, at most {} are accepted", name.size(), kMostNameBytes));
    }
    if (name == "__metadata__") {
      if (metadata_seen_) fail("__metadata__ appears twice");
      state_ = State::kMetadata;
      return true;
    }
    if (static_cast<int64_t>(header_.entries.size()) >= kMostTensors) {
      fail(fmt::format("more than {} tensors", kMostTensors));
    }
    entry_ =
        SafetensorsEntry{.name = std::move(name), .dtype = DType::kF32, .shape = {}, .begin = 0, .end = 0};
    state_ = State::kRootValue;
    return true;
  }
  if (state_ == State::kMetadata) {
    if (header_.metadata.contains(name))
      fail("the key " + in_quotes(name) + " appears twice in __metadata__");
    metadata_key_ = std::move(name);
    return true;
  }
  if (name == "dtype" && !has_dtype_) {
    state_ = State::kDtype;
  } else if (name == "shape" && !has_shape_) {
    state_ = State::kShape;
  } else if (name == "data_offsets" && offsets_ < 0) {
    state_ = State::kOffsets;
  } else {
    const bool known = name == "dtype" || name == "shape" || name == "data_offsets";
    fail_tensor("the key " + in_quotes(name) + (known ? " appears twice" : " is unknown"));
  }
  return true;
}

bool Parser::end_object() {
  if (state_ == State::kRoot) {
    state_ = State::kEnd;
  } else if (state_ == State::kMetadata) {
    state_ = State::kRoot;
  } else {
    if (!has_dtype_) fail_tensor("dtype is missing");
    if (!has_shape_) fail_tensor("shape is missing");
    if (offsets_ != 2) fail_tensor("data_offsets is missing");
    header_.entries.push_back(std::move(entry_));
    state_ = State::kRoot;
  }
  return true;
}

bool Parser::start_array(std::size_t) {
  if (in_array_ || (state_ != State::kShape && state_ != State::kOffsets)) fail_value("a list");
  in_array_ = true;
  if (state_ == State::kOffsets) offsets_ = 0;
  return true;
}

bool Parser::end_array() {
  in_array_ = false;
  if (state_ == State::kShape) has_shape_ = true;
  if (state_ == State::kOffsets && offsets_ != 2) fail_tensor("data_offsets must be two sizes");
  state_ = State::kTensor;
  return true;
}

[[noreturn]] void fail_entry(const SafetensorsEntry& entry, const std::string& what,
                             const std::string& place) {
  throw Error(Exit::kInput, {.area = "FILE-21",
                             .what = "tensor " + in_quotes(entry.name) + ": " + what,
                             .place = place,
                             .next = "the file is damaged: get it again"});
}

// Checks that the shape's bytes match the offsets and that these are inside the data.
void check_entry(const SafetensorsEntry& entry, int64_t data_bytes, const std::string& place) {
  const std::string offsets = fmt::format("data_offsets [{}, {}]", entry.begin, entry.end);
  if (entry.begin > entry.end) fail_entry(entry, offsets + " are not in order", place);
  if (entry.end > data_bytes) {
    fail_entry(entry, fmt::format("{} beyond buffer of {} bytes", offsets, data_bytes), place);
  }
  std::optional<int64_t> bytes = static_cast<int64_t>(dtype_size(entry.dtype));
  for (const int64_t size : entry.shape) {
    bytes = checked_multiply(*bytes, size);
    if (!bytes) fail_entry(entry, "the shape " + shape_text(entry.shape) + " overflows", place);
  }
  if (*bytes != entry.bytes()) {
    fail_entry(entry,
               fmt::format("{} hold {} bytes, the shape {} needs {}", offsets, entry.bytes(),
                           shape_text(entry.shape), *bytes),
               place);
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(const HeaderText& next, int64_t data_bytes,
                                           const std::string& place) {
  Stream stream(next, place);
  if (stream.at_end() || stream.front() != '{') fail_json("the header does not start with {", place, 8);
  Parser parser(stream, place);
  Json::sax_parse(StreamIterator(&stream), StreamIterator(nullptr), &parser);
  SafetensorsHeader header = parser.take();

  auto& entries = header.entries;
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t covered = 0;
  for (const SafetensorsEntry& entry : entries) {
    check_entry(entry, data_bytes, place);
    if (entry.begin != covered) {
      fail_entry(entry,
                 fmt::format("{}: it begins at {}, the data before ends at {}",
                             entry.begin < covered ? "overlaps the tensor before it" : "a hole before it",
                             entry.begin, covered),
                 place);
    }
    covered = entry.end;
  }
  if (covered != data_bytes) {
    fail_json(fmt::format("{} bytes after the last tensor belong to none", data_bytes - covered), place,
              8 + stream.position() + covered);
  }
  std::sort(entries.begin(), entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) { return a.name < b.name; });
  for (size_t i = 1; i < entries.size(); ++i) {
    if (entries[i].name == entries[i - 1].name) fail_entry(entries[i], "the name appears twice", place);
  }
  return header;
}

const char* safetensors_dtype(DType type) {
  for (const auto& [name, dtype] : kDtypes) {
    if (dtype == type) return name;
  }
  fail_check("known dtype", __FILE__, __LINE__, "");
}

bool parse_safetensors_dtype(std::string_view text, DType* type) {
  for (const auto& [name, dtype] : kDtypes) {
    if (text == name) return *type = dtype, true;
  }
  return false;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out += "]";
}

}  // namespace lm
