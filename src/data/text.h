// A prompt to tokens and an answer back to text, by the model's own tokenizer and chat template (a small
// Python program, as for training data). Blocks; throws Error(11) for a tokenizer that cannot be used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm {

struct TextTools {
  std::string python;       // interpreter
  std::string program_dir;  // the folder prepare/
  std::string model_dir;    // holds tokenizer.json
};

struct Prompt {
  std::vector<int32_t> tokens;
  std::vector<int32_t> stop;  // tokens that end an answer
};

// As a user's message when the model has a chat template, else as plain text.
Prompt encode_prompt(const TextTools& tools, const std::string& text);
std::string decode_tokens(const TextTools& tools, const std::vector<int32_t>& tokens);

}  // namespace lm
