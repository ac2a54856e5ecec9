#include "comm/group.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>

#include "base/error.h"

namespace lm {

int64_t longest_of(std::span<const ByteRange> ranges) {
  int64_t bytes = 0;
  for (const ByteRange& range : ranges) bytes = std::max(bytes, range.bytes);
  return bytes;
}

ByteRange part(const ByteRange& range, int64_t at, int64_t most) {
  return {range.begin + at, std::clamp<int64_t>(range.bytes - at, 0, most)};
}

Members every(int step, int first, int count, int place) {
  Members out{.ranks = {}, .place = place};
  for (int i = 0; i < count; ++i) out.ranks.push_back(first + i * step);
  return out;
}

void Group::set_machines(int each) {
  LM_CHECK(each > 0 && ranks() % each == 0, "equally many ranks on every machine");
  machine_ranks_ = each;
}

void Group::count_sent(int to, int64_t bytes) {
  sent_ += bytes;
  if (machine_of(to) != machine_of(rank())) sent_between_ += bytes;
}

void Group::all_gather(const char* what, std::byte* data, std::span<const ByteRange> shards) {
  const int each = machine_ranks_, count = static_cast<int>(shards.size());
  const int64_t longest = longest_of(shards);
  if (count < ranks()) {
    LM_CHECK(count > 0 && ranks() % count == 0, "groups of ranks, equally many in each");
    const int place = rank() % count;
    return all_gather_among(every(1, rank() - place, count, place), what, data, shards, longest);
  }
  if (each <= 1 || each == ranks())
    return all_gather_among(every(1, 0, ranks(), rank()), what, data, shards, longest);
  const int machines = ranks() / each, machine = rank() / each, place = rank() % each;
  std::vector<ByteRange> of_place;
  for (int m = 0; m < machines; ++m) of_place.push_back(shards[static_cast<size_t>(m * each + place)]);
  continues_ = true;
  all_gather_among(every(each, place, machines, machine), what, data, of_place, longest);
  continues_ = false;
  all_gather_among(every(1, machine * each, each, place), what, data, shards, longest);
}

void Group::share_copies(int group, const char* what, std::byte* data, std::span<const ByteRange> shards) {
  if (group == 1) return all_gather(what, data, shards);  // in two levels
  const int copies = ranks() / group, place = rank() % group;
  std::vector<ByteRange> of_place;
  for (int c = 0; c < copies; ++c) of_place.push_back(shards[static_cast<size_t>(c * group + place)]);
  all_gather_among(every(group, place, copies, rank() / group), what, data, of_place, longest_of(shards));
}

void Group::reduce_scatter(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                           const Add& add) {
  reduce_scatter_among(every(1, 0, ranks(), rank()), what, data, shards, longest_of(shards), add);
}

void Group::all_to_all(const char* what, const std::byte* data, std::span<const ByteRange> shards,
                       const Take& take) {
  reduce_scatter(what, data, shards,
                 [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                   for (size_t r = 0; r < from.size(); ++r)
                     take(static_cast<int>(r), offset, {from[r], static_cast<size_t>(bytes)});
                 });
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
  group.all_gather(what, reinterpret_cast<std::byte*>(all.data()), ranges);
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

void agree_on_version(Group& group, const std::string& mine) {
  struct Version {
    char text[64] = "";
  };
  Version own;
  mine.copy(own.text, sizeof own.text - 1);
  const std::vector<Version> all = group.gather("lmlaunch's version", own);
  for (size_t r = 1; r < all.size(); ++r) {
    const std::string first = all.front().text, other = all[r].text;
    if (other == first) continue;
    throw Error(Exit::kConfig,
                {.area = "RANK-32",
                 .what = fmt::format("rank {} is lmlaunch {}, and rank 0 is lmlaunch {}", r, other, first),
                 .place = "",
                 .next = "install the same lmlaunch on all machines"});
  }
}

}  // namespace lm
