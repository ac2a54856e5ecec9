// Any bytes as a tokenizer that llama.cpp is to be given: refused with Error(11), or what is written has
// every token. The input is tokenizer.json, a byte 0xFF and tokenizer_config.json.
#include "export/gguf_tokenizer.h"
#include "tests/fuzz/support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kVocab = 16;
  static lm::fuzz::MemoryFile tokenizer, config;
  static lm::fuzz::Directory directory;
  static const bool linked =
      (directory.link("tokenizer.json", tokenizer), directory.link("tokenizer_config.json", config), true);
  lm::fuzz::require(linked);
  std::string_view rest = lm::fuzz::text_of(data, size);
  tokenizer.set({lm::fuzz::next_text(rest)});
  config.set({rest});
  const auto values = lm::fuzz::parse(lm::Exit::kInput, [&] {
    lm::GgufValues out;
    lm::add_tokenizer(directory.path(), kVocab, "", out);
    return out;
  });
  // The model's kind, how it splits, tokens, their types, what is joined, and whether ids are added.
  lm::fuzz::require(!values || (values->count() >= 7 && std::ssize(values->bytes()) > kVocab));
  return 0;
}
