#include <fmt/format.h>

#include <iterator>

#include "mixed.h"
#include "simulated_job.h"

namespace lm::test {
namespace {

constexpr int64_t kOperations = 6;  // of a step in which ranks meet, at least

Fault random_harmless(Random& random, const Job& job) {
  Fault fault{.rank = static_cast<int>(random.below(job.ranks)), .harmless = true};
  fault.at = random.between(0, 1);
  fault.step = 1 + random.below(job.steps);
  fault.operation = random.below(kOperations);
  fault.kind = static_cast<Fault::Kind>(random.below(4));
  fault.peer = static_cast<int>((fault.rank + 1 + random.below(job.ranks - 1)) % job.ranks);
  double longest = kSilence / 4;
  if (fault.kind == Fault::Kind::kClockJump) longest = 1e4;
  if (fault.kind == Fault::Kind::kStraggler) longest = kLate / 2;
  fault.seconds = random.between(0, longest);
  return fault;
}

Fault random_fatal(Random& random, const Job& job) {
  constexpr Fault::Kind kFatal[] = {Fault::Kind::kDeath,     Fault::Kind::kDeath,    Fault::Kind::kStop,
                                    Fault::Kind::kCutLink,   Fault::Kind::kError,    Fault::Kind::kFailedSave,
                                    Fault::Kind::kOtherList, Fault::Kind::kStraggler};
  Fault fault{.kind = kFatal[random.below(std::ssize(kFatal))]};
  fault.rank = static_cast<int>(random.below(job.ranks));
  fault.peer = static_cast<int>((fault.rank + 1 + random.below(job.ranks - 1)) % job.ranks);
  fault.at = random.between(0.05, 1.2);
  fault.seconds = random.between(2 * kSilence, 4 * kSilence);
  if (fault.kind == Fault::Kind::kStraggler) fault.seconds = random.between(1.5 * kLate, 2 * kLate);
  fault.step = 1 + random.below(job.steps);
  fault.operation = random.below(kOperations);
  return fault;
}

}  // namespace

Job random_job(uint64_t seed, int most_ranks) {
  Random random(seed);
  Job job{.ranks = 2 + static_cast<int>(random.below(most_ranks - 1)), .seed = seed};
  if (job.ranks % 2 == 0 && random.below(2) == 0) job.each = 2;
  job.shape = random_shape(seed, job.ranks, job.each);
  const int64_t harmless = random.below(3), fatal = random.below(8) == 0 ? 2 : random.below(4) > 0 ? 1 : 0;
  for (int64_t i = 0; i < harmless; ++i) {
    Fault fault = random_harmless(random, job);
    // Of each jump a second counts as waiting: two at once are as long as the silence that these jobs allow.
    const bool again = i > 0 && fault.kind == Fault::Kind::kClockJump;
    if (!again || job.faults.front().kind != fault.kind) job.faults.push_back(fault);
  }
  for (int64_t i = 0; i < fatal; ++i) job.faults.push_back(random_fatal(random, job));
  return job;
}

std::string text_of(const Job& job) {
  constexpr const char* kNames[] = {
      "stops for", "has its clock ahead by", "computes for", "has a slow link", "has a cut link",
      "dies",      "has an error",           "cannot save",  "has another list"};
  const StepShape& shape = job.shape;
  std::string out = fmt::format(
      "{} ranks, {} a machine; stage {}, {} copies, {} layers, {} micro-batches in groups of {}, clip {}, "
      "recompute {} "
      "of {}, in backward {}, tied {}, {} tiles, {} slots, sums of {}, experts {}",
      job.ranks, job.each, shape.stage, shape.copies, shape.layers, shape.micro_batches, shape.group,
      static_cast<int>(shape.clip), static_cast<int>(shape.recompute.level), shape.recompute.every,
      shape.in_backward, shape.tied, shape.tiles, shape.slots, shape.machine_ranks, shape.experts);
  for (const Fault& fault : job.faults) {
    out += fmt::format("; rank {} {} (peer {}, at {:.2f} s, for {:.2f} s, step {}, operation {})", fault.rank,
                       kNames[static_cast<size_t>(fault.kind)], fault.peer, fault.at, fault.seconds,
                       fault.step, fault.operation);
  }
  return out;
}

}  // namespace lm::test
