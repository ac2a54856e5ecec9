#include "config/nearest.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace lm {
namespace {

size_t common_beginning(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

// With more changes a word has too little in common with another.
int most_changes(size_t a, size_t b) {
  return std::max(2, static_cast<int>(std::min(std::max(a, b), size_t{kLongestWord}) * 2 / 5));
}

}  // namespace

int edit_distance(std::string_view a, std::string_view b, int most) {
  a = a.substr(0, kLongestWord);
  b = b.substr(0, kLongestWord);
  std::array<int, kLongestWord + 1> rows[3];  // i-2, i-1 and i of the table
  int *before = rows[0].data(), *above = rows[1].data(), *row = rows[2].data();
  std::iota(above, above + b.size() + 1, 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int least = row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int change = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
      least = std::min(least, row[j]);
    }
    // No later number is smaller: a swap costs as much as changing one of its letters.
    if (least > most) return most + 1;
    std::swap(before, above);
    std::swap(above, row);
  }
  return std::min(above[b.size()], most + 1);
}

std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string* best = nullptr;
  int best_distance = kLongestWord;
  size_t best_common = 0;
  for (const std::string& candidate : candidates) {
    const int most = std::min(best_distance, most_changes(word.size(), candidate.size()));
    // Words whose lengths differ by n need at least n changes.
    const auto more =
        std::ssize(word.substr(0, kLongestWord)) - std::ssize(candidate.substr(0, kLongestWord));
    if (std::abs(more) > most) continue;
    const int distance = edit_distance(word, candidate, most);
    if (distance > most) continue;
    const size_t common = common_beginning(word, candidate);
    if (best == nullptr || distance < best_distance || common > best_common) {
      best = &candidate;
      best_distance = distance;
      best_common = common;
    }
  }
  return best == nullptr ? std::nullopt : std::optional(*best);
}

}  // namespace lm
