#include "data/document_reader.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// A chunk as a source of examples.
class ChunkSource : public DataSource {
 public:
  ChunkSource(const RowChunk& chunk, const std::vector<int64_t>& first) : chunk_(chunk), first_(first) {}
  int64_t examples() const override { return std::ssize(chunk_.lengths); }
  int64_t length(int64_t index) const override { return chunk_.lengths[static_cast<size_t>(index)]; }
  ExampleView example(int64_t index, int64_t begin, int64_t count, ExampleBuffer&) const override {
    const auto at = static_cast<size_t>(first_token(index) + begin), n = static_cast<size_t>(count);
    return {std::span(chunk_.tokens).subspan(at, n), std::span(chunk_.trained).subspan(at, n)};
  }
  std::span<const uint8_t> trained(int64_t index, ExampleBuffer& buffer) const override {
    return example(index, 0, length(index), buffer).trained;
  }
  std::string name() const override { return "rows"; }
  int64_t first_token(int64_t index) const override { return first_[static_cast<size_t>(index)]; }
  uint64_t fingerprint() const override { return 0; }

 private:
  const RowChunk& chunk_;
  const std::vector<int64_t>& first_;
};

std::vector<ExampleRange> text_ranges(const std::vector<uint8_t>& text) {
  std::vector<ExampleRange> out;
  for (int64_t i = 0; i < std::ssize(text); ++i) {
    if (text[static_cast<size_t>(i)] == 0) continue;
    if (out.empty() || out.back().end != i) out.push_back({i, i});
    out.back().end = i + 1;
  }
  return out;
}

}  // namespace

DocumentReader::DocumentReader(RowStream& rows, const LoaderOptions& options)
    : rows_(rows), options_(options) {}

bool DocumentReader::read_chunk() {
  const DocumentPosition end = position();
  std::optional<RowChunk> chunk = rows_.next();
  if (!chunk) return false;
  LM_CHECK(
      !options_.scored || std::ssize(chunk->labels) == std::ssize(chunk->lengths) * options_.scored->labels,
      "a label for each example");
  begin_ = end;
  chunk_ = std::move(*chunk);
  first_.assign(1, 0);
  for (const int64_t length : chunk_.lengths) first_.push_back(first_.back() + length);
  const ChunkSource source(chunk_, first_);
  pieces_ = pieces_of(
      source, options_, [](int64_t) { return true; }, text_ranges(chunk_.text), counts_);
  next_ = 0;
  return true;
}

std::optional<Document> DocumentReader::next() {
  while (next_ == pieces_.size()) {
    if (!read_chunk()) return std::nullopt;
  }
  const Piece& piece = pieces_[next_++];
  const auto first = static_cast<size_t>(first_[static_cast<size_t>(piece.example)] + piece.begin);
  const auto tokens = std::span(chunk_.tokens).subspan(first, static_cast<size_t>(piece.length));
  const auto trained = std::span(chunk_.trained).subspan(first, static_cast<size_t>(piece.length));
  if (const int64_t bad = first_foreign(tokens, options_.vocab); bad >= 0)
    refuse_token(bad, tokens[static_cast<size_t>(bad)], options_.vocab, options_.name);
  Document out{
      .tokens = {tokens.begin(), tokens.end()},
      .trained = {trained.begin(), trained.end()},
      // Numbers of examples have 31 bits in a batch; a longer epoch uses them again.
      .sample = static_cast<int32_t>((begin_.examples + piece.example) & std::numeric_limits<int32_t>::max()),
      .targets = piece.targets};
  if (options_.scored && options_.scored->labels > 0) {
    const auto of = chunk_.labels.begin() + piece.example * options_.scored->labels;
    out.labels.assign(of, of + options_.scored->labels);
  }
  return out;
}

DocumentPosition DocumentReader::position() const {
  if (next_ < pieces_.size()) return {begin_.rows, static_cast<int64_t>(next_), begin_.examples};
  if (first_.empty()) return begin_;
  return {chunk_.end, 0, begin_.examples + std::ssize(chunk_.lengths)};
}

void DocumentReader::seek(const DocumentPosition& position) {
  rows_.seek(position.rows);
  chunk_ = {};
  first_.clear();
  pieces_.clear();
  next_ = 0;
  begin_ = {position.rows, 0, position.examples};
  counts_ = {};
  if (position.skip == 0) return;
  const bool there = read_chunk() && position.skip > 0 && position.skip <= std::ssize(pieces_);
  if (!there) refuse_position({});
  next_ = static_cast<size_t>(position.skip);
}

double DocumentReader::share(const DocumentPosition& position) const {
  const auto total = static_cast<double>(std::max<int64_t>(rows_.total_bytes(), 1));
  return std::min(1.0, static_cast<double>(position.rows.done) / total);
}

}  // namespace lm
