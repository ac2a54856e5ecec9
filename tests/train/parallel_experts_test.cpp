// Experts that are divided among ranks, as threads of this process: the bits are those of ranks that have all
// of them.
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "base/error.h"
#include "kernels/library.h"
#include "tests/support/counts.h"
#include "thread_ranks.h"
#include "train/rank_experts.h"

namespace lm {
namespace {

using namespace offloaded_run;

// The base of an adapter on the attention.
Variant of_base(EncodingKind base, int64_t micro_batches) {
  Variant run;
  run.family = Family::kEightExperts;
  run.lora = true, run.base = base;
  run.layers = 2, run.micro_batches = micro_batches, run.steps = 5;
  run.stage = 0;
  return run;
}

void expect_bits_of_replicated(Variant run, int ranks, std::initializer_list<int64_t> stages = {1}) {
  run.parallel = false;
  const Outcome want = run_ranks(run, ranks);
  run.parallel = true;
  for (const int64_t stage : stages) {
    run.stage = stage;
    expect_same(run, ranks, run_ranks(run, ranks), want);
  }
}

TEST(ParallelExperts, GiveTheBitsOfReplicatedOnes) {
  for (const EncodingKind base : {EncodingKind::kPlain, EncodingKind::kNf4}) {
    for (const int ranks : {2, 4}) expect_bits_of_replicated(of_base(base, ranks), ranks, {0, 1, 2, 3});
  }
}

TEST(ParallelExperts, OfOneRankAreAllExperts) {
  expect_bits_of_replicated(of_base(EncodingKind::kPlain, 2), 1, {0});
}

// Micro-batches of different numbers of tokens, with blocks that are computed once more, and types.
TEST(ParallelExperts, GiveThemWhateverAStepLooksLike) {
  for (int which = 0; which < 4; ++which) {
    Variant run = of_base(which == 1 ? EncodingKind::kInt8 : EncodingKind::kPlain, which == 2 ? 4 : 6);
    run.dtype = which == 0 ? DType::kF32 : DType::kBF16;
    run.recompute = which % 2 == 1;
    run.level = which == 3 ? Recompute::kAttention : Recompute::kBlock;
    run.optimizer = run.activations = which == 2;  // on disk
    run.group = which == 3 ? 3 : 1;
    run.in_backward = which == 2;
    if (which == 2) run.activations = false, run.clip = Clip::kBlock;
    expect_bits_of_replicated(run, 2, {0, 2, 3});
  }
}

TEST(ParallelExperts, GiveThemBesideShardsInsideEachMachine) {
  Variant run = of_base(EncodingKind::kNf4, 4);
  run.nodes = 2, run.among = ZeroGroup::kMachine;
  run.stage = 1;
  expect_bits_of_replicated(run, 4, {1, 3});
}

// Biases and clamped GLUs; sigmoid scores, corrections, and an expert beside them that every rank has; an MLP
// beside them, with norms of both.
TEST(ParallelExperts, OfEveryKindOfMixtureGiveThem) {
  for (const Family family : {Family::kBiasedExperts, Family::kSigmoidExperts, Family::kExpertsBeside}) {
    Variant run = of_base(EncodingKind::kPlain, 4);
    run.family = family;
    for (const int ranks : {2, 4}) expect_bits_of_replicated(run, ranks, {1, 3});
  }
}

// Every rank has all pairs of low rank, and their gradients from the rows that its own experts have of all
// ranks. With one micro-batch to a rank they are the sums of replicated ones.
TEST(ParallelExperts, GiveTheirPairsTheSameBits) {
  for (int which = 0; which < 3; ++which) {
    Variant run = of_base(which == 1 ? EncodingKind::kNf4 : EncodingKind::kPlain, 2);
    run.adapted_experts = true;
    run.dtype = which == 0 ? DType::kF32 : DType::kBF16;
    run.fp32_adapters = which == 1;
    run.recompute = which == 2;
    if (which == 2) run.family = Family::kBiasedExperts;
    expect_bits_of_replicated(run, 2, {0, 1, 2, 3});
  }
}

// On a disk with the rest of their blocks: whole blocks, or experts once the routers of all ranks have
// chosen.
TEST(ParallelExperts, GiveThemFromADisk) {
  for (int which = 0; which < 4; ++which) {
    Variant run = of_base(which % 2 == 0 ? EncodingKind::kPlain : EncodingKind::kNf4, 4);
    run.family = which < 2 ? Family::kEightExperts : Family::kManyExperts;
    run.parallel = false;
    run.recompute = which == 2;
    run.group = which == 3 ? 2 : 1;
    const Outcome want = run_ranks(run, 2);
    run.parallel = run.weights = true;
    run.slots = 1;
    for (const int64_t stage : {0, 2}) {
      run.stage = stage;
      expect_same(run, 2, run_ranks(run, 2), want);
    }
  }
}

// Which of its experts another rank's tokens meet, too, a rank knows before it asks for them.
TEST(ParallelExperts, AreReadOnceAllRanksHaveChosen) {
  Variant run = of_base(EncodingKind::kPlain, 2);
  run.family = Family::kManyExperts;
  run.parallel = run.weights = true;
  run.slots = 1;
  SharedRegion region = SharedRegion::create(2);
  for (const std::string& error : on_threads(region, 2, [&](SharedGroup& group) {
         Training training(run, {}, {}, &group);
         const RoutedCounts routed = training.step(1).routed;
         const int64_t all = training.layout().blocks[1].own_bytes;
         EXPECT_GT(all, 0);
         EXPECT_GE(routed.waits, run.layers);
         EXPECT_GT(routed.bytes, 0);
         EXPECT_LT(static_cast<double>(routed.bytes), 0.65 * static_cast<double>(routed.waits * all));
       }))
    EXPECT_EQ(error, "");
}

std::atomic<int64_t> materialised;  // parts of matrices, by all ranks

const Kernels& counting_kernels() {
  static const Kernels kernels = [] {
    Kernels out = library_kernels(DeviceType::kCpu);
    out.materialise = [](const Materialise& args, StreamView stream) {
      ++materialised;
      library_kernels(DeviceType::kCpu).materialise(args, stream);
    };
    return out;
  }();
  return kernels;
}

// Of quantized experts, each of which has rows of every rank: once in a pass for all of them, but for one at
// the end of an owner's first wave.
TEST(ParallelExperts, AreMaterialisedOnceForAllRanks) {
  for (const int ranks : {2, 4}) {
    Variant run = of_base(EncodingKind::kNf4, ranks);
    run.parallel = true;
    run.kernels = &counting_kernels();
    materialised = 0;
    SharedRegion region = SharedRegion::create(ranks);
    for (const std::string& error : on_threads(region, ranks, [&](SharedGroup& group) {
           Training training(run, {}, {}, &group);
           training.step(1);
         }))
      EXPECT_EQ(error, "");
    // Of an expert, forward gate, up and down; backward gate and up again, and down, gate and up for the
    // gradients of what they have read. By every rank q, k, v and o, forward and backward.
    constexpr int64_t kExperts = 8, kOfExpert = 8, kOfAttention = 8;
    EXPECT_LE(materialised, run.layers * ((kExperts + ranks) * kOfExpert + ranks * kOfAttention))
        << ranks << " ranks";
    EXPECT_GT(materialised, run.layers * kExperts * kOfExpert / 2);
  }
}

// A rank has its experts' bytes of the base and no others.
TEST(ParallelExperts, TakeTheirShareOfMemory) {
  const auto frozen_bytes = [](const Variant& run, Group& group) {
    const Training training(run, {}, {}, &group);
    return training.layout().frozen_bytes;
  };
  for (const int ranks : {2, 4}) {
    std::vector<int64_t> whole(static_cast<size_t>(ranks)), shared = whole;
    for (const bool parallel : {false, true}) {
      SharedRegion region = SharedRegion::create(ranks);
      std::vector<std::thread> threads;
      for (int r = 0; r < ranks; ++r) {
        threads.emplace_back([&, r] {
          SharedGroup group(region, r);
          Variant run = of_base(EncodingKind::kNf4, ranks);
          run.parallel = parallel;
          (parallel ? shared : whole)[static_cast<size_t>(r)] = frozen_bytes(run, group);
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    SharedRegion region = SharedRegion::create(1);
    SharedGroup alone(region, 0);
    const Training training(of_base(EncodingKind::kNf4, 1), {}, {}, &alone);
    int64_t of_experts = 0;
    for (const BlockLayout& block : training.layout().blocks) {
      for (const TensorPlace& place : block.tensors) {
        for (const FrozenPiece& piece : place.pieces)
          of_experts += place.parameter.of_expert() ? frozen_piece_bytes(piece) : 0;
      }
    }
    ASSERT_GT(of_experts, 0);
    for (size_t r = 0; r < shared.size(); ++r)
      EXPECT_EQ(shared[r], whole[r] - of_experts / ranks * (ranks - 1)) << r;
  }
}

// Calls body(group) on each rank, whose memory makes several parts of a round.
template <class Body>
std::vector<std::string> on_ranks(int ranks, const Body& body) {
  SharedRegion region = SharedRegion::create(ranks, int64_t{1} << 18);
  return on_threads(region, ranks, body);
}

constexpr int64_t kWidth = 3;

// Row `row` of what `rank` sends.
float row_value(int rank, int64_t row) {
  return static_cast<float>(rank * 1000000 + row);
}

// Rank s sends `rows(s, d)` rows to rank d, those of lower ranks first, and they come in the order of ranks.
template <class Rows>
void exchange_rows(Group& group, int64_t row_bytes, const Rows& rows) {
  const int ranks = group.ranks(), own = group.rank();
  RankExperts experts(group, {}, {ranks, own}, 2, row_bytes);
  RowsOnTheWay way;
  int64_t out = 0, in = 0;
  for (int other = 0; other < ranks; ++other) {
    way.out.push_back({out, rows(own, other)});
    way.in.push_back({in, rows(other, own)});
    out += rows(own, other), in += rows(other, own);
    int64_t most = 0;
    for (int from = 0; from < ranks; ++from) most = std::max(most, rows(from, other));
    way.most.push_back(most);
  }
  std::vector<float> from(static_cast<size_t>(out * kWidth)), to(static_cast<size_t>(in * kWidth), -1);
  for (int64_t i = 0; i < out * kWidth; ++i) from[static_cast<size_t>(i)] = row_value(own, i);
  way.from = view_of(from.data(), DType::kF32, out, kWidth);
  way.to = view_of(to.data(), DType::kF32, in, kWidth);
  experts.move_rows(1, way);
  size_t at = 0;
  for (int source = 0; source < ranks; ++source) {
    int64_t first = 0;
    for (int other = 0; other < own; ++other) first += rows(source, other);
    for (int64_t i = 0; i < rows(source, own) * kWidth; ++i)
      ASSERT_EQ(to[at++], row_value(source, first * kWidth + i)) << source << " to " << own;
  }
  const std::vector<int32_t> start(4, own + 7);
  std::vector<int32_t> all(static_cast<size_t>(ranks * 4));
  experts.gather_starts(0, start, all.data());
  const std::span<const int32_t> found = experts.on_host(all);
  for (int i = 0; i < ranks * 4; ++i) ASSERT_EQ(found[static_cast<size_t>(i)], i / 4 + 7);
}

TEST(ParallelExperts, RowsComeToTheirOwnersInRounds) {
  for (const int ranks : {1, 2, 4}) {
    const auto few = [](int from, int to) { return int64_t{(from * 5 + to * 3) % 4}; };
    // Several rounds: a round has kExpertRoundBytes for all ranks.
    const auto many = [](int from, int to) { return int64_t{(from + to) % 3 == 0 ? 0 : 60000 + from - to}; };
    for (const std::string& error : on_ranks(ranks, [&](Group& group) { exchange_rows(group, 12, few); }))
      EXPECT_EQ(error, "");
    for (const std::string& error : on_ranks(ranks, [&](Group& group) { exchange_rows(group, 12, many); }))
      EXPECT_EQ(error, "");
    // A row that is longer than a rank's part of a round: one row to each then.
    const auto two = [](int, int) { return int64_t{2}; };
    for (const std::string& error :
         on_ranks(ranks, [&](Group& group) { exchange_rows(group, kExpertRoundBytes, two); }))
      EXPECT_EQ(error, "");
  }
}

// Who waits for a rank's rows hears of its end as in every other collective, and which rows they were.
TEST(ParallelExperts, ARankThatEndsIsNotWaitedFor) {
  const std::vector<std::string> errors = on_ranks(3, [](Group& group) {
    if (group.rank() == 1)
      throw Error(Exit::kNoSpace, {.area = "X", .what = "full", .place = "", .next = ""});
    exchange_rows(group, 12, [](int, int) { return int64_t{2}; });
  });
  for (const size_t r : {size_t{0}, size_t{2}})
    EXPECT_NE(errors[r].find("rows of experts of layer 1"), std::string::npos) << errors[r];
}

}  // namespace
}  // namespace lm
