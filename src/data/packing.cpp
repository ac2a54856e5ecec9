#include "data/packing.h"

#include <fmt/format.h>
#include <algorithm>
#include <limits>
#include <string>

#include "base/error.h"

namespace lm {
namespace {

int32_t count_targets(std::span<const uint8_t> trained) {
  return trained.empty() ? 0 : static_cast<int32_t>(std::ranges::count_if(trained.subspan(1), [](uint8_t t) {
    return t != 0;
  }));
}

// The training mask of one example from `begin` on, at most `length`.
std::span<const uint8_t> part(std::span<const uint8_t> trained, int64_t begin, int64_t length) {
  return trained.subspan(static_cast<size_t>(begin),
                         static_cast<size_t>(std::min(length, static_cast<int64_t>(trained.size()) - begin)));
}

void count_lost(std::span<const uint8_t> trained, int64_t max_length, PieceCounts& counts) {
  const auto cut = trained.subspan(static_cast<size_t>(max_length));
  const auto lost = std::ranges::count_if(cut, [](uint8_t mark) { return mark != 0; });
  counts.lost_targets += lost;
  counts.endless += lost > 0 ? 1 : 0;
}

}  // namespace

std::string describe_counts(const PieceCounts& counts, int64_t max_length) {
  const auto rows = [](int64_t n) { return fmt::format("{} row{}", n, n == 1 ? "" : "s"); };
  return fmt::format(
      "{}, {} tokens, at data.max_length {}: {} whole, {} cut, {} split into {}, {} dropped; {} tokens used, "
      "{} not",
      rows(counts.examples), counts.source_tokens, max_length, rows(counts.whole), counts.cut, counts.split,
      counts.split_pieces, counts.dropped, counts.used_tokens, counts.source_tokens - counts.used_tokens);
}

std::vector<Piece> cut_pieces(const DataSource& source, int64_t max_length, TooLong too_long,
                              const std::function<bool(int64_t)>& wanted, PieceCounts& counts,
                              std::span<const ExampleRange> text) {
  LM_CHECK(max_length >= 2 && max_length <= std::numeric_limits<int32_t>::max(), "data.max_length");
  LM_CHECK(source.examples() < std::numeric_limits<int32_t>::max(), "too many examples for 32-bit indices");
  std::vector<Piece> pieces;
  ExampleBuffer buffer;
  size_t range = 0;
  for (int64_t index = 0; index < source.examples(); ++index) {
    if (!wanted(index)) continue;
    ++counts.examples;
    const int64_t length = source.length(index);
    counts.source_tokens += length;
    while (range < text.size() && text[range].end <= index) ++range;
    const bool plain = range < text.size() && text[range].begin <= index;
    const TooLong choice = too_long != TooLong::kAuto ? too_long : plain ? TooLong::kSplit : TooLong::kCut;
    if (length > max_length) {
      ++counts.too_long;
      if (choice == TooLong::kDrop) ++counts.dropped;
      if (choice == TooLong::kDrop) continue;
    }
    const std::span<const uint8_t> trained = source.trained(index, buffer);
    if (length > max_length && choice == TooLong::kCut) count_lost(trained, max_length, counts);
    const int64_t stop = choice == TooLong::kSplit ? length : std::min(length, max_length);
    int64_t used = 0, covered = 0;  // number of pieces; end of the last one
    for (int64_t begin = 0; begin + 1 < stop; begin += max_length - 1) {
      const std::span<const uint8_t> marks =
          part(trained.first(static_cast<size_t>(stop)), begin, max_length);
      const int32_t targets = count_targets(marks);
      if (targets == 0) continue;
      ++used;
      pieces.push_back({.example = static_cast<int32_t>(index),
                        .length = static_cast<int32_t>(marks.size()),
                        .begin = begin,
                        .targets = targets});
      counts.tokens += pieces.back().length;
      counts.targets += targets;
      const int64_t end = begin + pieces.back().length;
      counts.used_tokens += end - std::max(begin, covered);
      covered = end;
    }
    if (used == 0) ++counts.without_target;
    const bool longer = length > max_length, splits = choice == TooLong::kSplit;
    ++(used == 0 ? counts.dropped : !longer ? counts.whole : splits ? counts.split : counts.cut);
    if (longer && splits) counts.split_pieces += used;
  }
  LM_CHECK(static_cast<int64_t>(pieces.size()) < std::numeric_limits<int32_t>::max(), "too many pieces");
  return pieces;
}

std::vector<Piece> whole_pieces(const DataSource& source, int64_t max_length, bool drops,
                                const std::function<bool(int64_t)>& wanted, PieceCounts& counts) {
  LM_CHECK(source.examples() < std::numeric_limits<int32_t>::max(), "too many examples for 32-bit indices");
  std::vector<Piece> pieces;
  for (int64_t index = 0; index < source.examples(); ++index) {
    if (!wanted(index)) continue;
    const int64_t length = source.length(index), used = std::min(length, max_length);
    const bool longer = length > max_length;
    ++counts.examples;
    counts.source_tokens += length;
    counts.too_long += longer ? 1 : 0;
    if (length == 0 || (longer && drops)) {
      ++counts.dropped;
      continue;
    }
    ++(longer ? counts.cut : counts.whole);
    counts.used_tokens += used;
    counts.tokens += used;
    ++counts.targets;
    pieces.push_back({static_cast<int32_t>(index), static_cast<int32_t>(used), 0, 1});
  }
  return pieces;
}

std::vector<Piece> ending_pieces(const DataSource& source, int64_t max_length, PieceCounts& counts) {
  LM_CHECK(source.examples() < std::numeric_limits<int32_t>::max(), "too many examples for 32-bit indices");
  std::vector<Piece> pieces;
  ExampleBuffer buffer;
  for (int64_t index = 0; index < source.examples(); ++index) {
    const int64_t whole = source.length(index), length = std::min(whole, max_length), begin = whole - length;
    const std::span<const uint8_t> trained = source.trained(index, buffer);
    const int32_t targets = count_targets(part(trained, begin, length));
    const int32_t lost = count_targets(trained) - targets;
    pieces.push_back({.example = static_cast<int32_t>(index),
                      .length = static_cast<int32_t>(length),
                      .begin = begin,
                      .targets = targets});
    ++counts.examples;
    ++(begin > 0 ? counts.cut : counts.whole);
    counts.too_long += begin > 0 ? 1 : 0;
    counts.lost_targets += lost;
    if (lost > 0) ++counts.endless;
    counts.source_tokens += whole;
    counts.used_tokens += length;
    counts.tokens += length;
    counts.targets += targets;
  }
  return pieces;
}

std::span<const int32_t> SequenceList::sequence(int64_t index) const {
  const auto begin = static_cast<size_t>(start[static_cast<size_t>(index)]);
  return std::span(order).subspan(begin, static_cast<size_t>(start[static_cast<size_t>(index) + 1]) - begin);
}

SequenceList pack_sequences(std::span<const Piece> pieces, const std::function<int64_t(int64_t)>& at,
                            bool packing, int64_t max_length, int64_t count, int64_t before) {
  if (count < 0) count = std::ssize(pieces);
  // Pass 1: the sequence of each piece, in visiting order. room[s % kOpenSequences] is the space left in
  // sequence s, for the newest kOpenSequences ones; older sequences are closed.
  std::vector<int32_t> visited(static_cast<size_t>(count)), sequence_of(static_cast<size_t>(count));
  std::vector<int64_t> room(kOpenSequences, 0);
  int64_t sequences = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t piece = at(i);
    const int64_t length = pieces[static_cast<size_t>(piece)].length + before;
    LM_CHECK(length <= max_length, "a piece is longer than a sequence");
    int64_t home = packing ? std::max<int64_t>(0, sequences - kOpenSequences) : sequences;
    while (home < sequences && room[static_cast<size_t>(home % kOpenSequences)] < length) ++home;
    if (home == sequences) room[static_cast<size_t>(sequences++ % kOpenSequences)] = max_length;
    room[static_cast<size_t>(home % kOpenSequences)] -= length;
    visited[static_cast<size_t>(i)] = static_cast<int32_t>(piece);
    sequence_of[static_cast<size_t>(i)] = static_cast<int32_t>(home);
  }
  // Pass 2: gather by sequence, keeping the visiting order inside each.
  SequenceList list;
  list.start.assign(static_cast<size_t>(sequences) + 1, 0);
  for (const int32_t s : sequence_of) ++list.start[static_cast<size_t>(s) + 1];
  for (size_t s = 1; s < list.start.size(); ++s) list.start[s] += list.start[s - 1];
  std::vector<int64_t> next(list.start.begin(), list.start.end() - 1);
  list.order.resize(visited.size());
  for (size_t i = 0; i < visited.size(); ++i) {
    list.order[static_cast<size_t>(next[static_cast<size_t>(sequence_of[i])]++)] = visited[i];
  }
  return list;
}

}  // namespace lm
