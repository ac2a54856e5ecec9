#include "weights/safetensors.h"

#include <sstream>
#include <utility>

#include "tests/weights/support.h"

namespace lm {
namespace {

using test::contains;
using test::raw_file;
using test::refusal;

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   uint64_t begin, uint64_t end) {
  std::ostringstream out;
  out << '"' << name << "\":{\"dtype\":\"" << dtype << "\",\"shape\":" << shape << ",\"data_offsets\":["
      << begin << ',' << end << "]}";
  return out.str();
}

struct Row {
  std::string what;
  std::string file;
  std::string message;  // empty: the file must be accepted
};

std::string zeros(size_t n) {
  return std::string(n, '\0');
}

// Two tensors that lie as they should.
const std::string kA = tensor("a", "F32", "[2]", 0, 8), kB = tensor("b", "U8", "[3]", 8, 11);
const std::string kBoth = "{" + kA + "," + kB + "}";

// Each limit of the grammar: a row just inside and one just outside. First what is accepted, and counts.
std::vector<Row> rows_of_counts() {
  const std::string long_name(1024, 'n'), too_long(1025, 'n');
  return {
      {"two tensors", raw_file(kBoth, zeros(11)), ""},
      {"no tensors", raw_file("{}", ""), ""},
      {"spaces after the header", raw_file(kBoth + "     ", zeros(11)), ""},
      {"metadata", raw_file("{\"__metadata__\":{\"format\":\"pt\"}," + kA + "}", zeros(8)), ""},
      {"metadata last", raw_file("{" + kA + ",\"__metadata__\":{}}", zeros(8)), ""},
      {"a scalar", raw_file("{" + tensor("a", "F32", "[]", 0, 4) + "}", zeros(4)), ""},
      {"an empty tensor between",
       raw_file("{" + kA + "," + tensor("e", "F32", "[0,7]", 8, 8) + "," + kB + "}", zeros(11)), ""},
      {"data in another order than the names",
       raw_file("{" + tensor("z", "U8", "[1]", 0, 1) + "," + tensor("a", "U8", "[1]", 1, 2) + "}", zeros(2)),
       ""},
      {"offsets that are not aligned",
       raw_file("{" + tensor("u", "U8", "[1]", 0, 1) + "," + tensor("f", "F32", "[1]", 1, 5) + "}", zeros(5)),
       ""},
      {"every dtype",
       raw_file("{" + tensor("a", "F64", "[1]", 0, 8) + "," + tensor("b", "I64", "[1]", 8, 16) + "," +
                    tensor("c", "F32", "[1]", 16, 20) + "," + tensor("d", "I32", "[1]", 20, 24) + "," +
                    tensor("e", "F16", "[1]", 24, 26) + "," + tensor("f", "BF16", "[1]", 26, 28) + "," +
                    tensor("g", "I16", "[1]", 28, 30) + "," + tensor("h", "I8", "[1]", 30, 31) + "," +
                    tensor("i", "U8", "[1]", 31, 32) + "," + tensor("j", "BOOL", "[1]", 32, 33) + "}",
                zeros(33)),
       ""},
      {"8 dimensions", raw_file("{" + tensor("a", "U8", "[1,1,1,1,1,1,1,1]", 0, 1) + "}", zeros(1)), ""},
      {"9 dimensions", raw_file("{" + tensor("a", "U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) + "}", zeros(1)),
       "dimensions"},
      {"a name of 1024 bytes", raw_file("{" + tensor(long_name, "U8", "[1]", 0, 1) + "}", zeros(1)), ""},
      {"a name of 1025 bytes", raw_file("{" + tensor(too_long, "U8", "[1]", 0, 1) + "}", zeros(1)),
       "1025 bytes"},
  };
}

// The header as JSON.
std::vector<Row> rows_of_headers() {
  return {
      {"0 bytes", "", "no header"},
      {"7 bytes", zeros(7), "no header"},
      {"8 zero bytes", zeros(8), "start with {"},
      {"a header length past the end by one", raw_file(kBoth.size() + 12, kBoth, zeros(11)), "only"},
      {"a header length of 2^63", raw_file(uint64_t{1} << 63, kBoth, zeros(11)), "more than 100000000"},
      {"a header length of 2^64 - 1", raw_file(UINT64_MAX, kBoth, zeros(11)), "more than 100000000"},
      {"a header length of 100000001", raw_file(100000001, kBoth, zeros(11)), "more than 100000000"},
      {"a header length of 100000000 in a small file", raw_file(100000000, kBoth, zeros(11)), "only"},
      {"a leading space", raw_file(" " + kBoth, zeros(11)), "start with {"},
      {"a byte order mark", raw_file("\xEF\xBB\xBF" + kBoth, zeros(11)), "start with {"},
      {"a list", raw_file("[]", ""), "start with {"},
      {"half a header", raw_file(kBoth.substr(0, kBoth.size() / 2), zeros(11)), "byte"},
      {"text after the object", raw_file(kBoth + "x", zeros(11)), "byte"},
      {"a second object", raw_file(kBoth + "{}", zeros(11)), "byte"},
      {"a NUL after the object", raw_file(kBoth + zeros(1), zeros(11)), "byte"},
      {"no UTF-8", raw_file("{" + tensor("\xff", "U8", "[1]", 0, 1) + "}", zeros(1)), "UTF-8"},
      {"a name twice", raw_file("{" + kA + "," + tensor("a", "U8", "[3]", 8, 11) + "}", zeros(11)), "twice"},
      {"a name twice, once escaped",
       raw_file("{" + kA + "," + tensor("\\u0061", "U8", "[3]", 8, 11) + "}", zeros(11)), "twice"},
      {"dtype twice",
       raw_file("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", zeros(1)),
       "twice"},
      {"shape twice",
       raw_file("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}", zeros(1)),
       "twice"},
      {"data_offsets twice",
       raw_file("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"data_offsets\":[0,1]}}",
                zeros(1)),
       "twice"},
      {"__metadata__ twice", raw_file("{\"__metadata__\":{},\"__metadata__\":{}}", ""), "twice"},
      {"a metadata key twice", raw_file("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", ""), "twice"},
      {"metadata that is a number", raw_file("{\"__metadata__\":{\"a\":1}}", ""), "__metadata__"},
      {"metadata that is an object", raw_file("{\"__metadata__\":{\"a\":{}}}", ""), "__metadata__"},
      {"metadata that is a list", raw_file("{\"__metadata__\":{\"a\":[]}}", ""), "__metadata__"},
      {"metadata that is null", raw_file("{\"__metadata__\":{\"a\":null}}", ""), "__metadata__"},
      {"metadata as a string", raw_file("{\"__metadata__\":\"pt\"}", ""), "__metadata__"},
  };
}

// Entries and where their bytes lie.
std::vector<Row> rows_of_entries() {
  return {
      {"an unknown key",
       raw_file("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", zeros(1)),
       "unknown"},
      {"no dtype", raw_file("{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", zeros(1)), "dtype is missing"},
      {"no shape", raw_file("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", zeros(1)),
       "shape is missing"},
      {"no offsets", raw_file("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", zeros(1)),
       "data_offsets is missing"},
      {"one offset", raw_file("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", zeros(1)),
       "two sizes"},
      {"three offsets",
       raw_file("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", zeros(1)), "two sizes"},
      {"an entry that is a number", raw_file("{\"a\":1}", zeros(1)), "\"a\""},
      {"an entry that is a list", raw_file("{\"a\":[]}", zeros(1)), "\"a\""},
      {"an unknown dtype", raw_file("{" + tensor("a", "F8_E4M3", "[1]", 0, 1) + "}", zeros(1)), "F8_E4M3"},
      {"a dtype in small letters", raw_file("{" + tensor("a", "f32", "[1]", 0, 4) + "}", zeros(4)), "f32"},
      {"a negative size", raw_file("{" + tensor("a", "U8", "[-1]", 0, 1) + "}", zeros(1)), "shape"},
      {"a size that is no integer", raw_file("{" + tensor("a", "U8", "[1.0]", 0, 1) + "}", zeros(1)),
       "shape"},
      {"a size of 2^63 - 1",
       raw_file("{" + tensor("a", "F32", "[9223372036854775807]", 0, 4) + "}", zeros(4)), "overflows"},
      {"a size of 2^63", raw_file("{" + tensor("a", "U8", "[9223372036854775808]", 0, 1) + "}", zeros(1)),
       "shape"},
      {"a product of 2^64", raw_file("{" + tensor("a", "U8", "[4294967296,4294967296]", 0, 0) + "}", ""),
       "overflows"},
      {"a list in the shape", raw_file("{" + tensor("a", "U8", "[[1]]", 0, 1) + "}", zeros(1)), "shape"},
      {"100000 levels", raw_file("{\"a\":" + std::string(100000, '[') + "}", zeros(1)), "\"a\""},
      {"100000 objects",
       raw_file(
           [] {
             std::string s;
             for (int i = 0; i < 100000; ++i) s += "{\"a\":";
             return s;
           }(),
           zeros(1)),
       "a"},
      {"offsets the wrong way round", raw_file("{" + tensor("a", "U8", "[1]", 1, 0) + "}", zeros(1)),
       "not in order"},
      {"an end past the buffer by one", raw_file("{" + tensor("a", "U8", "[12]", 0, 12) + "}", zeros(11)),
       "beyond buffer of 11 bytes"},
      {"an offset of 2^64 - 1", raw_file("{" + tensor("a", "U8", "[1]", 0, UINT64_MAX) + "}", zeros(1)),
       "data_offsets"},
      {"a shape smaller than its bytes", raw_file("{" + tensor("a", "F32", "[1]", 0, 8) + "}", zeros(8)),
       "hold 8 bytes"},
      {"a shape larger than its bytes", raw_file("{" + tensor("a", "F32", "[3]", 0, 8) + "}", zeros(8)),
       "needs 12"},
      {"a hole of one byte", raw_file("{" + kA + "," + tensor("b", "U8", "[2]", 9, 11) + "}", zeros(11)),
       "hole"},
      {"a hole at the start", raw_file("{" + tensor("a", "U8", "[1]", 1, 2) + "}", zeros(2)), "hole"},
      {"an overlap of one byte", raw_file("{" + kA + "," + tensor("b", "U8", "[4]", 7, 11) + "}", zeros(11)),
       "overlap"},
      {"the same bytes twice", raw_file("{" + kA + "," + tensor("b", "F32", "[2]", 0, 8) + "}", zeros(8)),
       "overlap"},
      {"one trailing byte", raw_file(kBoth, zeros(12)), "belong to none"},
      {"one byte missing", raw_file(kBoth, zeros(10)), "beyond buffer of 10 bytes"},
      {"trailing bytes without tensors", raw_file("{}", zeros(1)), "belong to none"},
      {"a control character", raw_file("{" + tensor("a\x01", "U8", "[1]", 0, 1) + "}", zeros(1)), "byte"},
  };
}

std::vector<Row> rows() {
  std::vector<Row> all = rows_of_counts();
  for (const auto& more : {rows_of_headers(), rows_of_entries()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(Safetensors, AcceptsWhatIsInsideEachLimitAndRefusesWhatIsOutside) {
  const test::TemporaryDirectory directory;
  for (const Row& row : rows()) {
    const std::string path = directory / "x.safetensors";
    test::write_text(path, row.file);
    if (row.message.empty()) {
      EXPECT_NO_THROW(SafetensorsFile{path}) << row.what;
      continue;
    }
    const std::string message = refusal([&] { SafetensorsFile file(path); });
    EXPECT_TRUE(contains(message, row.message)) << row.what << ": " << message;
    EXPECT_TRUE(contains(message, "x.safetensors")) << row.what << ": " << message;
    EXPECT_LT(message.size(), 1500u) << row.what;
  }
}

HeaderText one_piece(std::string_view text) {
  return [text]() mutable { return std::exchange(text, {}); };
}

TEST(Safetensors, AHeaderMayComeInPiecesOfAnySize) {
  int accepted = 0, refused = 0;
  for (const Row& row : rows()) {
    uint64_t length = 0;
    if (row.file.size() < 8 || row.file.size() > 3000) continue;
    std::memcpy(&length, row.file.data(), 8);
    // With a NUL, which of two faults is found first depends on the pieces.
    if (length > row.file.size() - 8 || row.what == "a NUL after the object") continue;
    const std::string_view text = std::string_view(row.file).substr(8, length);
    const int64_t data_bytes = static_cast<int64_t>(row.file.size() - 8 - length);
    (row.message.empty() ? accepted : refused) += 1;
    for (const size_t size : {1, 3, 64}) {
      std::string_view rest = text;
      const auto next = [&] {
        const std::string_view piece = rest.substr(0, size);
        rest.remove_prefix(piece.size());
        return piece;
      };
      auto outcome = [](const std::function<SafetensorsHeader()>& parse) -> std::string {
        try {
          std::string names;
          for (const SafetensorsEntry& entry : parse().entries) names += entry.name + shape_text(entry.shape);
          return names;
        } catch (const Error& error) {
          return error.report();
        }
      };
      EXPECT_EQ(outcome([&] { return parse_safetensors_header(next, data_bytes, "x"); }),
                outcome([&] { return parse_safetensors_header(one_piece(text), data_bytes, "x"); }))
          << row.what;
    }
  }
  EXPECT_GT(accepted, 5);
  EXPECT_GT(refused, 30);
}

TEST(Safetensors, EveryTruncationOfAFileIsRefused) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "x.safetensors";
  test::write_tensors(path, {{"a", DType::kF32, {3, 2}}, {"b", DType::kBF16, {5}}});
  const std::string whole = test::read_text(path);
  for (size_t n = 0; n < whole.size(); ++n) {
    test::write_text(path, whole.substr(0, n));
    EXPECT_THROW(SafetensorsFile{path}, Error) << n;
  }
}

TEST(Safetensors, AFileTruncatedAfterItWasOpenedIsAnErrorAtTheRead) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "x.safetensors";
  test::write_tensors(path, {{"a", DType::kF32, {4096}}});
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, 1000);
  std::vector<std::byte> bytes(4096 * 4);
  EXPECT_TRUE(contains(refusal([&] { file.read(*file.find("a"), 0, bytes); }), "ends early"));
}

TEST(Safetensors, WhatIsWrittenIsReadAgain) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "x.safetensors";
  const std::vector<TensorInfo> tensors = {{"small", DType::kU8, {3}},
                                           {"half", DType::kBF16, {3, 1, 2}},
                                           {"b", DType::kF32, {}},
                                           {"a \"quoted\" \xC3\xA9", DType::kF32, {2}},
                                           {"empty", DType::kF32, {0, 4}}};
  {
    SafetensorsWriter writer(path, tensors);
    ASSERT_EQ(writer.order().size(), 5u);
    EXPECT_EQ(writer.order()[0].name, "a \"quoted\" \xC3\xA9");
    EXPECT_EQ(writer.order()[3].name, "half");
    for (const TensorInfo& tensor : writer.order()) {
      const auto bytes = test::tiny_bytes(tensor);
      for (const std::byte& byte : bytes) writer.write(tensor.name, {&byte, 1});
    }
    writer.commit();
  }
  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.entries().size(), tensors.size());
  for (const TensorInfo& tensor : tensors) {
    const SafetensorsEntry* entry = file.find(tensor.name);
    ASSERT_NE(entry, nullptr) << tensor.name;
    EXPECT_EQ(entry->shape, tensor.shape);
    EXPECT_EQ(entry->dtype, tensor.dtype);
    EXPECT_EQ(entry->begin % static_cast<int64_t>(dtype_size(entry->dtype)), 0) << tensor.name;
    std::vector<std::byte> bytes(static_cast<size_t>(entry->bytes()));
    file.read(*entry, 0, bytes);
    EXPECT_EQ(bytes, test::tiny_bytes(tensor));
  }
  EXPECT_EQ(file.find("absent"), nullptr);
  uint64_t length = 0;
  std::memcpy(&length, test::read_text(path).data(), 8);
  EXPECT_EQ(length % 8, 0u);
}

TEST(Safetensors, AnUnfinishedFileNeverAppears) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "x.safetensors";
  const float value = 1;
  const auto bytes = std::as_bytes(std::span(&value, 1));
  {
    SafetensorsWriter writer(path, {{"a", DType::kF32, {2}}, {"b", DType::kF32, {1}}});
    writer.write("a", bytes);
    EXPECT_THROW(writer.write("b", bytes), Error);  // a is not complete
    EXPECT_THROW(writer.commit(), Error);
    writer.write("a", bytes);
    EXPECT_THROW(writer.write("a", bytes), Error);  // past its end
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(Safetensors, AMillionTensorsAreTheMost) {
  const test::TemporaryDirectory directory;
  for (const int extra : {0, 1}) {
    std::string header = "{";
    for (int i = 0; i < 1'000'000 + extra; ++i) {
      if (i) header += ',';
      const std::string n = std::to_string(i), next = std::to_string(i + 1);
      header.append(1, '"').append(n).append("\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[");
      header.append(n).append(1, ',').append(next).append("]}");
    }
    header += '}';
    if (extra == 0) {
      EXPECT_EQ(parse_safetensors_header(one_piece(header), 1'000'000, "x").entries.size(), 1'000'000u);
    } else {
      const std::string message =
          refusal([&] { parse_safetensors_header(one_piece(header), 1'000'001, "x"); });
      EXPECT_TRUE(contains(message, "more than 1000000 tensors")) << message;
    }
  }
}

}  // namespace
}  // namespace lm
