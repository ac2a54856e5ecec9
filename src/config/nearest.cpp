#include "config/nearest.h"

#include <algorithm>
#include <array>

namespace lm {
namespace {

constexpr size_t kLongest = 64;

size_t common_beginning(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

}  // namespace

int edit_distance(std::string_view a, std::string_view b) {
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  using Row = std::array<int, kLongest + 1>;
  Row before{}, above{}, row{};  // rows i-2, i-1 and i of the table
  for (size_t j = 0; j <= b.size(); ++j) above[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int change = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before = above;
    above = row;
  }
  return above[b.size()];
}

std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string* best = nullptr;
  int best_distance = 0;
  size_t best_common = 0;
  for (const std::string& candidate : candidates) {
    // A word that is n letters longer than another is at least n changes away from it.
    const auto more =
        std::abs(std::ssize(word.substr(0, kLongest)) - std::ssize(candidate.substr(0, kLongest)));
    if (best != nullptr && more > best_distance) continue;
    const int distance = edit_distance(word, candidate);
    const size_t common = common_beginning(word, candidate);
    if (best == nullptr || distance < best_distance || (distance == best_distance && common > best_common)) {
      best = &candidate;
      best_distance = distance;
      best_common = common;
    }
  }
  if (best == nullptr) return std::nullopt;
  const size_t longer = std::max(word.size(), best->size());
  if (best_distance > 2 && static_cast<size_t>(best_distance) * 5 > longer * 2) return std::nullopt;
  return *best;
}

}  // namespace lm
