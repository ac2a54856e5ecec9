// "Did you mean": edit distance, and the nearest of a list of words. Pure; the cost is the product of the
// lengths, so words are cut at kLongestWord characters.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

inline constexpr int kLongestWord = 64;

// The number of insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`; `most` +
// 1 if there are more than `most`.
int edit_distance(std::string_view a, std::string_view b, int most = kLongestWord);

// The candidate with the smallest distance, the earliest of equals with the longest common beginning, among
// the similar ones (distance <= 2 or at most 40 % of the longer word); empty: none.
std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace lm
