// Which rows ranks' experts work on, and when, where each rank keeps some of a layer's experts. The rows that
// an expert has of one rank are a job: they are multiplied together, as they are where every rank has every
// expert, because how many rows a product has may decide the bits of each. Rows of several ranks, and of
// several experts, never meet in a sum.
//
// An owner takes its jobs in the order of experts and then of ranks, in waves of at most `capacity` rows:
// as many as the rank with most tokens has for all experts together, so that the memory of an owner does not
// depend on the routers, and evenly spread rows are one wave. So the jobs of an expert are in one wave, or in
// the next one too, and its matrices are materialised for them together. In a wave rows lie by rank, as they
// come. All ranks make the same waves from the same counts. A value.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/expert_exchange.h"

namespace lm {

struct ExpertJob {
  int rank = 0;  // whose rows they are
  int64_t expert = 0;
  int64_t at = 0;    // the first of them, of its owner's wave
  int64_t rows = 0;  // at least 1
};

class ExpertWaves {
 public:
  // counts [ranks, E], E a multiple of the number of ranks.
  ExpertWaves(std::span<const int32_t> counts, const ExpertShare& share);

  int64_t count() const { return count_; }
  int64_t capacity() const { return capacity_; }
  // Of this rank as an owner, by rank and then by expert.
  std::span<const ExpertJob> jobs(int64_t wave) const;
  // How many rows these have.
  int64_t rows(int64_t wave) const;
  // A wave's rows to their owners, and, with `back`, from there. Of a rank's own rows, those sorted by expert
  // are `from`, an owner's wave is `to`; the other way round with `back`.
  RowsOnTheWay on_the_way(int64_t wave, bool back) const;

 private:
  // Of a wave, what passes from each rank to each owner: [rank, owner].
  struct Wave {
    std::vector<ExpertJob> jobs;  // of this rank
    std::vector<RowRange> source, owner;
  };
  // The wave of each job of an owner: [rank, its expert].
  std::vector<int64_t> waves_of(std::span<const int32_t> counts, int owner) const;
  void add_owner(std::span<const int32_t> counts, int owner);
  Wave& wave(int64_t number);
  size_t pair(int rank, int owner) const {
    return static_cast<size_t>(rank) * static_cast<size_t>(share_.ranks) + static_cast<size_t>(owner);
  }

  ExpertShare share_;
  int64_t experts_;
  int64_t capacity_ = 0, count_ = 0;
  std::vector<Wave> waves_;
};

}  // namespace lm
