// Tokenised examples in memory, for tests of what reads a source.
#pragma once

#include <fmt/format.h>
#include <xxhash.h>

#include "base/error.h"
#include "data/source.h"

namespace lm {

class MemorySource : public DataSource {
 public:
  // A training target is a token whose mark is not 0; a missing list of marks means that all are.
  void add(std::vector<int32_t> tokens, std::vector<uint8_t> trained = {}) {
    if (trained.empty()) trained.assign(tokens.size(), 1);
    LM_CHECK(trained.size() == tokens.size(), "one mark per token");
    const auto size = static_cast<int64_t>(tokens.size());
    examples_.push_back({std::move(tokens), std::move(trained), tokens_});
    tokens_ += size;
  }

  int64_t examples() const override { return static_cast<int64_t>(examples_.size()); }
  int64_t length(int64_t index) const override { return static_cast<int64_t>(at(index).tokens.size()); }
  ExampleView example(int64_t index, int64_t begin, int64_t count, ExampleBuffer&) const override {
    const Stored& stored = at(index);
    LM_CHECK(begin >= 0 && count >= 0 && begin <= length(index) - count,
             fmt::format("range of example {}", index));
    const auto first = static_cast<size_t>(begin), n = static_cast<size_t>(count);
    return {std::span(stored.tokens).subspan(first, n), std::span(stored.trained).subspan(first, n)};
  }
  std::span<const uint8_t> trained(int64_t index, ExampleBuffer&) const override { return at(index).trained; }
  std::string name() const override { return "memory"; }
  int64_t first_token(int64_t index) const override { return at(index).first; }
  uint64_t fingerprint() const override {
    uint64_t hash = static_cast<uint64_t>(examples());
    for (const Stored& stored : examples_) {
      hash = XXH3_64bits_withSeed(stored.tokens.data(), stored.tokens.size() * sizeof(int32_t), hash);
      hash = XXH3_64bits_withSeed(stored.trained.data(), stored.trained.size(), hash);
    }
    return hash;
  }

 private:
  struct Stored {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> trained;
    int64_t first;
  };
  const Stored& at(int64_t index) const {
    LM_CHECK(index >= 0 && index < examples(), fmt::format("example {}", index));
    return examples_[static_cast<size_t>(index)];
  }

  std::vector<Stored> examples_;
  int64_t tokens_ = 0;
};

}  // namespace lm
