// Packing of examples into sequences: handles examples that are too long, and assigns examples to sequences.
// Plain values and functions of lengths only, so that a run can be counted and resumed without reading
// tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/source.h"

namespace lm {

// A document of the model's input: a part of one example, at most max_length tokens.
struct Piece {
  int32_t example;
  int32_t length;   // tokens, >= 2; of a text that is scored >= 1
  int64_t begin;    // first token of the part in its example
  int32_t targets;  // marked tokens that have a predecessor in this piece, > 0
};

struct PieceCounts {
  int64_t examples = 0;        // considered
  int64_t tokens = 0;          // of the pieces
  int64_t targets = 0;         // of the pieces
  int64_t without_target = 0;  // examples without a remaining target
  int64_t too_long = 0;        // examples over max_length: cut, split or dropped
  // Partition of the examples: used whole, cut, split, or not used at all.
  int64_t whole = 0, cut = 0, split = 0, dropped = 0;
  int64_t split_pieces = 0;   // pieces of the split ones
  int64_t source_tokens = 0;  // of all examples
  int64_t used_tokens = 0;    // of those, in a piece
  // For examples cut by data.too_long: the number of targets cut off, and of examples that lost their last
  // target, the end of an answer.
  int64_t lost_targets = 0, endless = 0;
};

// "120 rows, 45120 tokens, at data.max_length 512: 100 rows whole, 12 cut, 8 split into 30, 0 dropped; 41120
// tokens used, 4000 not".
std::string describe_counts(const PieceCounts& counts, int64_t max_length);

// Examples [begin, end) of a source.
struct ExampleRange {
  int64_t begin = 0, end = 0;
};

// The pieces of the examples that `wanted` accepts, in the source's order. `text`, ascending, are the
// plain-text ones.
//   cut    the first max_length tokens
//   split  parts of max_length; a part begins with the last token of the one before it, as context only, so
// that each target is trained exactly once
//   drop   nothing
// auto split for plain text, cut for others: the end of a conversation cannot be learned without its
// beginning
std::vector<Piece> cut_pieces(const DataSource& source, int64_t max_length, TooLong too_long,
                              const std::function<bool(int64_t)>& wanted, PieceCounts& counts,
                              std::span<const ExampleRange> text = {});

// One piece of each wanted example that is scored as a whole, which counts as one target; `drops`: none of a
// longer example, else its first max_length tokens.
std::vector<Piece> whole_pieces(const DataSource& source, int64_t max_length, bool drops,
                                const std::function<bool(int64_t)>& wanted, PieceCounts& counts);

// One piece of each example of an evaluation set of choices: its last max_length tokens, as
// lm-evaluation-harness shortens a context. Counts an ending that is longer itself in `endless`.
std::vector<Piece> ending_pieces(const DataSource& source, int64_t max_length, PieceCounts& counts);

// The pieces of each sequence of an epoch. Sequence s has order[start[s]] .. order[start[s + 1] - 1].
struct SequenceList {
  std::vector<int32_t> order;  // indices into the pieces
  std::vector<int64_t> start;  // sequences + 1 entries
  int64_t sequences() const { return static_cast<int64_t>(start.size()) - 1; }
  std::span<const int32_t> sequence(int64_t index) const;
};

// One piece per sequence, or with `packing` as many whole pieces as fit into max_length: first fit among the
// kOpenSequences newest unfinished sequences, taking pieces in the order at(0), at(1), ...; sequences are
// emitted in the order in which they were begun. `count`: the number of entries of at(), which may repeat;
// -1: every piece once. `before`: tokens of a sequence that stand before each piece.
SequenceList pack_sequences(std::span<const Piece> pieces, const std::function<int64_t(int64_t)>& at,
                            bool packing, int64_t max_length, int64_t count = -1, int64_t before = 0);

}  // namespace lm
