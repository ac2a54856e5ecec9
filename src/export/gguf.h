// The file format of llama.cpp (GGUF, version 3), written in order: named values, a table of tensors, then
// their data at multiples of 32 bytes. Integers are little-endian:
//
//   file   = "GGUF" u32:3 u64:tensors u64:values value* tensor* zeros data
//   value  = string:name u32:type payload          string = u64:bytes text
//   tensor = string:name u32:dimensions u64:size* u32:type u64:offset    sizes from the fastest on; offset in
//   data
//
// One thread; errors are those of NewFile.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace lm {

// The numbers are the format's. kQ8_0: blocks of 32 weights as 8-bit numbers with an fp16 scale.
enum class GgufType : uint32_t { kF32 = 0, kF16 = 1, kQ8_0 = 8, kBF16 = 30 };

inline constexpr int64_t kGgufBlock = 32;  // weights of a block of kQ8_0

int64_t gguf_bytes(GgufType type, int64_t elements);

// fp32 -> the type, nearest, ties to even. False when a finite value leaves fp16's range.
bool gguf_convert(std::span<const float> from, GgufType type, std::vector<std::byte>& to);

class GgufValues {
 public:
  void add(const std::string& name, const std::string& value);
  void add(const std::string& name, uint32_t value);
  void add(const std::string& name, float value);
  void add(const std::string& name, bool value);
  void add(const std::string& name, const std::vector<std::string>& values);
  void add(const std::string& name, const std::vector<int32_t>& values);
  void add(const std::string& name, const std::vector<float>& values);
  void add(const std::string& name, const std::vector<bool>& values);
  uint64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void begin(const std::string& name, uint32_t type);
  void begin_list(const std::string& name, uint32_t type, size_t size);
  std::string bytes_;
  uint64_t count_ = 0;
};

struct GgufTensor {
  std::string name;
  std::vector<int64_t> shape;  // rows first, as everywhere else in lmlaunch
  GgufType type = GgufType::kF32;
  int64_t elements() const;
  int64_t columns() const { return shape.back(); }
};

class GgufWriter {
 public:
  GgufWriter(const std::string& path, const GgufValues& values, std::vector<GgufTensor> tensors);
  // The next weights of the tensors in their order: fp32, one or more whole rows.
  void write(std::span<const float> weights);
  void commit();

 private:
  std::vector<GgufTensor> tensors_;
  NewFile file_;
  size_t current_ = 0;
  int64_t written_ = 0;  // elements of it
  std::vector<std::byte> bytes_;
};

}  // namespace lm
