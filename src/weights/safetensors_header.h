// The header of a safetensors file as a value, read from untrusted bytes and checked completely: unique
// names, shapes without overflow, data without hole, overlap or trailing bytes. Pure functions, no I/O (the
// fuzzer calls the parser directly); errors are Error(11) "FILE-21". Offsets in bytes from the start of the
// data.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace lm {

// The format's own cap, and ours: past these a file is hostile, not large. (Depth needs no cap: the grammar
// has three levels, and a fourth is refused at once.)
inline constexpr int64_t kMostHeaderBytes = 100'000'000;
inline constexpr int64_t kMostTensors = 1'000'000;
inline constexpr int64_t kMostDimensions = 8;
inline constexpr int64_t kMostNameBytes = 1024;

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t bytes() const { return end - begin; }
  int64_t elements() const { return bytes() / static_cast<int64_t>(dtype_size(dtype)); }
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in name order
  std::map<std::string, std::string> metadata;
};

// `next` returns the JSON (padding included) in chunks, an empty one at its end: the text is never whole in
// memory, so a header of n bytes costs less than 2n. `data_bytes` is the size of the data after it, `place`
// the path.
using HeaderText = std::function<std::string_view()>;
SafetensorsHeader parse_safetensors_header(const HeaderText& next, int64_t data_bytes,
                                           const std::string& place);

// "BF16", "F32", ...: the spelling in the file; the inverse returns false for unsupported types.
const char* safetensors_dtype(DType type);
bool parse_safetensors_dtype(std::string_view text, DType* type);

// "[2, 3]", for messages.
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace lm
