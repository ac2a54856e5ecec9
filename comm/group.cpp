#include "comm/group.h"

#include <fmt/format.h>
#include <algorithm>
#include <numeric>
#include <optional>

#include "base/error.h"

namespace lm {

int64_t longest_of(std::span<const ByteRange> ranges) {
  int64_t bytes = 0;
  for (const ByteRange& range : ranges) bytes = std::max(bytes, range.bytes);
  return bytes;
}

void Group::exchange(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                     const Add& add) {
  Members all{.ranks = std::vector<int>(static_cast<size_t>(ranks())), .place = rank()};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  exchange_among(all, what, data, shards, longest_of(shards), add);
}

std::vector<std::string> gather_texts(Group& group, const char* what, const std::string& mine) {
  const std::vector<int64_t> lengths = group.gather(what, static_cast<int64_t>(std::ssize(mine)));
  std::vector<ByteRange> ranges;
  int64_t bytes = 0;
  for (const int64_t length : lengths) {
    ranges.push_back({bytes, length});
    bytes += length;
  }
  std::string all(static_cast<size_t>(bytes), '\0');
  mine.copy(all.data() + ranges[static_cast<size_t>(group.rank())].begin, mine.size());
  group.share(what, reinterpret_cast<std::byte*>(all.data()), ranges);
  std::vector<std::string> out;
  for (const ByteRange& range : ranges)
    out.push_back(all.substr(static_cast<size_t>(range.begin), static_cast<size_t>(range.bytes)));
  return out;
}

void together(Group& group, const char* what, const std::function<void()>& work) {
  std::optional<Error> failure;
  try {
    work();
  } catch (const Error& error) {
    failure = error;
  }
  const std::vector<int> codes = group.gather(what, failure ? static_cast<int>(failure->code()) : 0);
  const auto first = std::ranges::find_if(codes, [](int code) { return code != 0; });
  if (first == codes.end()) return;
  const auto by = static_cast<size_t>(first - codes.begin());
  const std::vector<std::string> texts = gather_texts(group, what, failure ? failure->what() : "");
  const auto mine = static_cast<size_t>(group.rank());
  if (failure && (mine == by || texts[mine] != texts[by]))
    throw Error(static_cast<Exit>(*first), failure->text());
  throw Error(static_cast<Exit>(*first), {.area = "PEER-32",
                                          .what = std::string(what) + " has failed",
                                          .place = fmt::format("rank {}", by),
                                          .next = "see that rank's message"});
}

}  // namespace lm
