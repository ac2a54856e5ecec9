// "Did you mean": edit distance and the nearest of a list of words. Pure; cost is the product of the lengths,
// so words are cut at 64 characters.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

// Insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.
int edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest distance, the earliest of equals with the longest common beginning; nothing
// when even that one shares too little (distance > 2 and more than 40 % of the longer word).
std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace lm
