#include "offload/relocations.h"

#include <algorithm>
#include <iterator>

namespace lm {

ExtentPiece Relocations::find(int file, int64_t offset, int64_t bytes) const {
  const auto next = moved_.upper_bound({file, offset});
  if (next != moved_.begin()) {
    const auto& [from, to] = *std::prev(next);
    const int64_t inside = offset - from.second;
    if (from.first == file && inside < to.bytes)
      return {to.file, to.offset + inside, std::min(bytes, to.bytes - inside)};
  }
  if (next != moved_.end() && next->first.first == file) bytes = std::min(bytes, next->first.second - offset);
  return {file, offset, bytes};
}

void Relocations::add(int file, int64_t offset, const ExtentPiece& to) {
  const int64_t end = offset + to.bytes;
  // A range that was relocated before is split: its parts on both sides stay.
  auto it = moved_.upper_bound({file, offset});
  if (it != moved_.begin()) --it;
  while (it != moved_.end() && it->first < Place{file, end}) {
    const auto [from, old] = *it;
    const int64_t old_end = from.second + old.bytes;
    if (from.first != file || old_end <= offset) {
      ++it;
      continue;
    }
    it = moved_.erase(it);
    if (from.second < offset) moved_[from] = {old.file, old.offset, offset - from.second};
    if (old_end > end) moved_[{file, end}] = {old.file, old.offset + end - from.second, old_end - end};
  }
  moved_[{file, offset}] = to;
}

}  // namespace lm
