// What the tests of this folder share: a temporary directory, raw safetensors files (valid or not), tiny
// models.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "spec/block_layout.h"
#include "weights/model_directory.h"
#include "weights/safetensors.h"

namespace lm::test {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "lm_weights_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = pattern;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}

// "VmRSS:", "VmHWM:" of this process; 0: not known.
inline int64_t status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}
inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// length + header + data, exactly as given.
inline std::string raw_file(uint64_t length, const std::string& header, const std::string& data) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + header + data;
}
inline std::string raw_file(const std::string& header, const std::string& data) {
  return raw_file(header.size(), header, data);
}

// Runs `body`, which must throw Error(11); returns the whole message.
inline std::string refusal(const std::function<void()>& body, Exit code = Exit::kInput) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.report();
    EXPECT_FALSE(error.text().next.empty()) << error.report();
    EXPECT_FALSE(error.text().place.empty()) << error.report();
    return error.report();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline nlohmann::json tiny_config(const std::string& type = "llama", bool tied = false) {
  return {{"model_type", type},      {"hidden_size", 12},        {"intermediate_size", 20},
          {"num_hidden_layers", 2},  {"num_attention_heads", 4}, {"num_key_value_heads", 2},
          {"head_dim", 6},           {"vocab_size", 33},         {"tie_word_embeddings", tied},
          {"torch_dtype", "float32"}};
}

// A value that depends on the tensor and the element alone, exact in bf16 and fp16.
inline float tiny_value(const std::string& name, int64_t i) {
  return static_cast<float>(
             static_cast<int64_t>((std::hash<std::string>()(name) + static_cast<size_t>(i) * 7) % 255) -
             127) /
         64;
}

inline std::vector<TensorInfo> tiny_tensors(const ModelSpec& spec, DType dtype) {
  std::vector<TensorInfo> tensors;
  for (const BlockParameters& block : list_parameters(spec, nullptr)) {
    for (const Parameter& parameter : block.trainable) {
      for (const ParameterPart& part : parameter.parts) {
        tensors.push_back({.name = part.name, .dtype = dtype, .shape = parameter.shape(part)});
      }
    }
  }
  return tensors;
}

// The bytes of tiny_value in fp32 or bf16 (by truncation: the values are exact).
inline std::vector<std::byte> tiny_bytes(const TensorInfo& tensor) {
  std::vector<std::byte> out(static_cast<size_t>(tensor.bytes()));
  const size_t size = dtype_size(tensor.dtype);
  for (size_t i = 0; i < out.size() / size; ++i) {
    const float value = tiny_value(tensor.name, static_cast<int64_t>(i));
    std::memcpy(out.data() + i * size, reinterpret_cast<const char*>(&value) + 4 - size, size);
  }
  return out;
}

inline void write_tensors(const std::string& path, const std::vector<TensorInfo>& tensors) {
  SafetensorsWriter writer(path, tensors);
  for (const TensorInfo& tensor : writer.order()) writer.write(tensor.name, tiny_bytes(tensor));
  writer.commit();
}

// A model directory with one weight file.
inline ModelSpec write_tiny_model(const std::string& directory, const nlohmann::json& config, DType dtype) {
  std::filesystem::create_directories(directory);
  write_text(directory + "/config.json", config.dump(2));
  const ModelSpec spec = read_model_spec(directory);
  write_tensors(directory + "/model.safetensors", tiny_tensors(spec, dtype));
  return spec;
}

}  // namespace lm::test
