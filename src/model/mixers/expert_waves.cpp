#include "model/mixers/expert_waves.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace lm {

ExpertWaves::ExpertWaves(std::span<const int32_t> counts, const ExpertShare& share)
    : share_(share), experts_(std::ssize(counts) / share.ranks) {
  LM_CHECK(experts_ % share.ranks == 0 && experts_ * share.ranks == std::ssize(counts),
           "every rank keeps equally many experts");
  for (int rank = 0; rank < share.ranks; ++rank) {
    const auto own = counts.subspan(static_cast<size_t>(rank * experts_), static_cast<size_t>(experts_));
    capacity_ = std::max(capacity_, std::accumulate(own.begin(), own.end(), int64_t{0}));
  }
  for (int owner = 0; owner < share.ranks; ++owner) add_owner(counts, owner);
  count_ = std::ssize(waves_);
}

ExpertWaves::Wave& ExpertWaves::wave(int64_t number) {
  const auto pairs = static_cast<size_t>(share_.ranks) * static_cast<size_t>(share_.ranks);
  while (std::ssize(waves_) <= number)
    waves_.push_back({{}, std::vector<RowRange>(pairs), std::vector<RowRange>(pairs)});
  return waves_[static_cast<size_t>(number)];
}

std::vector<int64_t> ExpertWaves::waves_of(std::span<const int32_t> counts, int owner) const {
  const int64_t each = share_.each(experts_);
  std::vector<int64_t> out(static_cast<size_t>(share_.ranks * each));
  int64_t number = 0, used = 0;
  for (int64_t e = 0; e < each; ++e) {
    for (int rank = 0; rank < share_.ranks; ++rank) {
      const int64_t rows = counts[static_cast<size_t>(rank * experts_ + owner * each + e)];
      if (used + rows > capacity_) ++number, used = 0;
      used += rows;
      out[static_cast<size_t>(rank * each + e)] = number;
    }
  }
  return out;
}

void ExpertWaves::add_owner(std::span<const int32_t> counts, int owner) {
  const int64_t each = share_.each(experts_);
  const std::vector<int64_t> numbers = waves_of(counts, owner);
  std::vector<int64_t> used;  // rows of each wave
  for (int rank = 0; rank < share_.ranks; ++rank) {
    const auto own = counts.subspan(static_cast<size_t>(rank * experts_), static_cast<size_t>(experts_));
    int64_t first = std::accumulate(own.begin(), own.begin() + owner * each, int64_t{0});
    for (int64_t e = 0; e < each; ++e) {
      const int64_t expert = owner * each + e, rows = own[static_cast<size_t>(expert)];
      if (rows == 0) continue;
      const int64_t number = numbers[static_cast<size_t>(rank * each + e)];
      Wave& here = wave(number);
      used.resize(std::max(used.size(), static_cast<size_t>(number) + 1));
      int64_t& at = used[static_cast<size_t>(number)];
      RowRange &source = here.source[pair(rank, owner)], &there = here.owner[pair(rank, owner)];
      if (source.rows == 0) source.first = first, there.first = at;
      source.rows += rows, there.rows += rows;
      if (owner == share_.place) here.jobs.push_back({rank, expert, at, rows});
      at += rows;
      first += rows;
    }
  }
}

std::span<const ExpertJob> ExpertWaves::jobs(int64_t wave) const {
  return waves_[static_cast<size_t>(wave)].jobs;
}

int64_t ExpertWaves::rows(int64_t wave) const {
  const std::span<const ExpertJob> all = jobs(wave);
  return all.empty() ? 0 : all.back().at + all.back().rows;
}

RowsOnTheWay ExpertWaves::on_the_way(int64_t number, bool back) const {
  const Wave& here = waves_[static_cast<size_t>(number)];
  RowsOnTheWay out;
  for (int other = 0; other < share_.ranks; ++other) {
    out.out.push_back(back ? here.owner[pair(other, share_.place)] : here.source[pair(share_.place, other)]);
    out.in.push_back(back ? here.source[pair(share_.place, other)] : here.owner[pair(other, share_.place)]);
    int64_t most = 0;
    for (int from = 0; from < share_.ranks; ++from)
      most = std::max(most, here.owner[back ? pair(other, from) : pair(from, other)].rows);
    out.most.push_back(most);
  }
  return out;
}

}  // namespace lm
