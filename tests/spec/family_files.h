// config.json of tests, small, and what is read of it.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "spec/model_spec.h"

namespace lm::family_files {

using nlohmann::json;

inline json small(const std::string& type) {
  return {{"model_type", type},     {"hidden_size", 64},          {"intermediate_size", 96},
          {"num_hidden_layers", 6}, {"num_attention_heads", 4},   {"num_key_value_heads", 2},
          {"vocab_size", 300000},   {"tie_word_embeddings", true}};
}

inline json gpt2() {
  return {{"model_type", "gpt2"}, {"n_embd", 64}, {"n_layer", 3}, {"n_head", 4}, {"vocab_size", 300}};
}

inline ModelSpec parse(const json& config) {
  return parse_model_spec(config.dump(), "config.json");
}

inline void expect_refused(const json& config, const std::string& part) {
  try {
    parse_model_spec(config.dump(), "dir/config.json");
    ADD_FAILURE() << "accepted: " << config.dump();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << ": " << error.what();
  }
}

inline json with(json config, const std::string& key, const json& value) {
  config[key] = value;
  return config;
}

inline std::vector<int64_t> windows(const ModelSpec& spec) {
  std::vector<int64_t> out;
  for (const LayerSpec& layer : spec.layers) out.push_back(layer.attention().window);
  return out;
}
inline std::vector<int> tables(const ModelSpec& spec) {
  std::vector<int> out;
  for (const LayerSpec& layer : spec.layers) out.push_back(layer.attention().rope);
  return out;
}

}  // namespace lm::family_files
