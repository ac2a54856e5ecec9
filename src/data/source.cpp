#include "data/source.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "base/error.h"

namespace lm {

void MemorySource::add(std::vector<int32_t> tokens, std::vector<uint8_t> trained) {
  if (trained.empty()) trained.assign(tokens.size(), 1);
  LM_CHECK(trained.size() == tokens.size(), "one mark per token");
  const auto size = static_cast<int64_t>(tokens.size());
  examples_.push_back({std::move(tokens), std::move(trained), tokens_});
  tokens_ += size;
}

const MemorySource::Stored& MemorySource::at(int64_t index) const {
  LM_CHECK(index >= 0 && index < examples(), fmt::format("example {}", index));
  return examples_[static_cast<size_t>(index)];
}

int64_t MemorySource::length(int64_t index) const {
  return static_cast<int64_t>(at(index).tokens.size());
}

ExampleView MemorySource::example(int64_t index, int64_t begin, int64_t count, ExampleBuffer&) const {
  const Stored& stored = at(index);
  LM_CHECK(begin >= 0 && count >= 0 && begin <= length(index) - count,
           fmt::format("range of example {}", index));
  const auto first = static_cast<size_t>(begin), n = static_cast<size_t>(count);
  return {std::span(stored.tokens).subspan(first, n), std::span(stored.trained).subspan(first, n)};
}

std::span<const uint8_t> MemorySource::trained(int64_t index, ExampleBuffer&) const {
  return at(index).trained;
}

uint64_t MemorySource::fingerprint() const {
  uint64_t hash = static_cast<uint64_t>(examples());
  for (const Stored& stored : examples_) {
    hash = XXH3_64bits_withSeed(stored.tokens.data(), stored.tokens.size() * sizeof(int32_t), hash);
    hash = XXH3_64bits_withSeed(stored.trained.data(), stored.trained.size(), hash);
  }
  return hash;
}

}  // namespace lm
