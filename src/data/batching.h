// Builds micro-batches of documents, and divides a step's sequences among ranks. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/batch.h"
#include "data/source.h"

namespace lm {

// Of data whose examples are scored as a whole.
struct ScoredData {
  bool pairs = false;      // an example is a chosen text and a rejected one, two documents
  int64_t labels = 0;      // numbers of an example in LoaderOptions::labels and EvalSource::labels
  int32_t pad_token = -1;  // a document's scores are those of its last token that is not this one
};

struct DocumentView {
  ExampleView text;
  int32_t sample;                 // number of its example
  std::span<const float> labels;  // ScoredData::labels numbers; else empty
  int64_t virtual_tokens = 0;     // before it
};

// Appends a document; the caller ends the batch's document_start.
void append_document(const DocumentView& document, const std::optional<ScoredData>& scored, Batch& batch);

// The first token whose id is not below `vocab`; -1: none.
int64_t first_foreign(std::span<const int32_t> tokens, int64_t vocab);
// Throws Error(11) for the id of that token of the data. `name`: the user's files.
[[noreturn]] void refuse_token(int64_t position, int32_t id, int64_t vocab, const std::string& name);

// Sequences [begin, end) of a step, of one micro-batch.
struct MicroRange {
  int64_t begin = 0, end = 0;
  // Of a rank with fewer micro-batches than another: all ranks run as many as the one with the most, since
  // collectives must match. The sequence is then without targets.
  bool filler = false;
};
// The micro-batches of a rank in a step of `count` sequences, which are divided among the ranks as equal,
// contiguous ranges.
std::vector<MicroRange> micro_ranges(int64_t count, int64_t micro_batch, int rank, int world);

}  // namespace lm
