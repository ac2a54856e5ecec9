// "Did you mean": edit distance and the nearest of a list of words. Pure; cost is the product of the lengths,
// so words are cut at kLongestWord characters.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

inline constexpr int kLongestWord = 64;

// Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`; of more than `most` it
// is only said that they are more: `most` + 1.
int edit_distance(std::string_view a, std::string_view b, int most = kLongestWord);

// The candidate with the smallest distance, the earliest of equals with the longest common beginning, among
// those that share enough (distance <= 2 or at most 40 % of the longer word); nothing where there is none.
std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace lm
