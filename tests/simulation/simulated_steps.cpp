#include "simulated_steps.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "model/mixers/expert_waves.h"
#include "step_values.h"

namespace lm::test {
namespace {

constexpr auto kFloat = static_cast<int64_t>(sizeof(float));
constexpr auto kDouble = static_cast<int64_t>(sizeof(double));

template <class Number>
std::byte* bytes_of(std::span<Number> numbers) {
  return reinterpret_cast<std::byte*>(numbers.data());
}

void add_up(float* to, int64_t elements, std::span<const std::byte* const> from) {
  for (int64_t i = 0; i < elements; ++i) {
    float sum = 0;
    for (size_t r = 0; r < from.size(); ++r) {
      float one = 0;
      std::memcpy(&one, from[r] + i * kFloat, sizeof one);
      sum = r == 0 ? one : sum + one;
    }
    to[i] = sum;
  }
}

bool in_shards(const StepShape& shape, int ranks) {
  return shape.stage >= 1 && ranks / shape.copies > 1;
}

}  // namespace

int64_t unit_count(const StepShape& shape) {
  return shape.layers + 2;
}

int64_t part_elements(int64_t unit) {
  return unit == 0 ? 24 : 16;
}

StepShape random_shape(uint64_t seed, int ranks, int each) {
  Random random(seed);
  StepShape shape{.layers = 1 + random.below(2), .micro_batches = 1 + random.below(2)};
  shape.stage = static_cast<int>(random.below(4));
  shape.copies = shape.stage == 0 ? ranks : ranks % 4 == 0 && random.below(2) == 0 ? 2 : 1;
  if (each > 1 && ranks > each && random.below(2) == 0) shape.machine_ranks = each;
  constexpr Clip kClips[] = {Clip::kGlobal, Clip::kGlobal, Clip::kBlock, Clip::kNone};
  shape.clip = kClips[random.below(std::ssize(kClips))];
  constexpr Recompute kLevels[] = {Recompute::kNone, Recompute::kAttention, Recompute::kBlock};
  shape.recompute = {kLevels[random.below(std::ssize(kLevels))], 1 + random.below(2)};
  shape.in_backward = random.below(4) == 0;
  shape.group = shape.in_backward || random.below(2) == 0 ? shape.micro_batches : 1;
  shape.tied = random.below(2) == 0;
  shape.tiles = random.below(3);
  shape.slots = 1 + random.below(3);
  shape.experts = random.below(2) == 0;
  return shape;
}

StepConfig step_config(const StepShape& shape, int ranks) {
  StepConfig out{.units = schedule_units(shape.layers),
                 .micro_batches = shape.micro_batches,
                 .tied = shape.tied,
                 .recompute = shape.recompute,
                 .clip = shape.clip,
                 .group = shape.group,
                 .ranks = ranks,
                 .sharded = in_shards(shape, ranks),
                 .copies = shape.copies,
                 .in_backward = shape.in_backward};
  const int64_t tiles = std::max<int64_t>(shape.tiles, 1);
  for (ScheduleUnit& unit : out.units) {
    unit.off_device = shape.tiles > 0;
    unit.end_tile = tiles;
    // Every rank has the embedding's weights, as a plan has it.
    unit.in_shards = out.sharded && shape.stage == 3 && unit.role != UnitRole::kEmbedding;
    out.first_tile.push_back(unit.block * tiles);
  }
  std::vector<char> weights, all(out.units.size(), 1);
  for (const ScheduleUnit& unit : out.units) weights.push_back(unit.in_shards ? 1 : 0);
  if (out.sharded && shape.stage == 3) out.pool(Pool::kWeights) = {std::move(weights), shape.slots};
  // What is left of an array after its reduce_scatter is a shard: it takes no second group's.
  if (out.sharded && shape.stage >= 2 && !shape.in_backward && shape.group == shape.micro_batches)
    out.pool(Pool::kGradients) = {std::move(all), shape.slots};
  out.machine_ranks = shape.machine_ranks;
  return out;
}

SimulatedSteps::SimulatedSteps(Setup setup)
    : setup_(std::move(setup)),
      group_(setup_.group),
      lists_(step_config(setup_.shape, setup_.group.ranks())),
      config_(lists_.config()),
      sharding_(config_.sharding()),
      part_(sharding_.part(setup_.group.rank())),
      micros_(static_cast<size_t>(config_.micro_batches)),
      loans_(config_.units.size()),
      reduce_scatters_("reduce_scatter of gradients of unit", config_.units.size()),
      shares_("all_gather of gradients of unit", config_.units.size()),
      norms_("all_gather of gradient norms of unit", config_.units.size()),
      gathers_("gather of weights of unit", config_.units.size()) {
  const auto make = [this](Pool pool) {
    ShardStoreSetup store{.group = group_,
                          .shards = [this](int64_t unit) { return shards(unit, kFloat); },
                          .name = [](int64_t) { return std::string("an array"); },
                          .slots = config_.pool(pool).slots,
                          .gathers = pool == Pool::kWeights};
    for (int64_t u = 0; u < std::ssize(config_.units); ++u)
      store.bytes.push_back(config_.pool(pool).holds(u) ? elements(u) * kFloat : 0);
    return std::make_unique<ShardStore>(std::move(store));
  };
  if (config_.pool(Pool::kWeights).slots > 0) weight_shards_ = make(Pool::kWeights);
  if (config_.pool(Pool::kGradients).slots > 0) gradient_shards_ = make(Pool::kGradients);
  if (config_.machine_ranks > 1) {
    const int64_t partial = group_.ranks() / config_.machine_ranks * kReduceScatterPart * kFloat;
    levels_ = std::make_unique<TwoLevels>(group_, config_.machine_ranks, DeviceType::kCpu, partial);
  }
  if (setup_.shape.experts)
    experts_ = std::make_unique<RankExperts>(group_, StreamView{}, ExpertShare{config_.ranks, group_.rank()},
                                             setup_.shape.layers, static_cast<int64_t>(sizeof(uint64_t)));
  for (Micro& micro : micros_) {
    micro.inputs.resize(config_.units.size() + 1);
    micro.borrowed.resize(config_.units.size());
  }
  for (int64_t u = 0; u < std::ssize(config_.units); ++u) {
    const auto count = static_cast<size_t>(elements(u));
    std::vector<float> whole;
    for (int64_t i = 0; i < elements(u); ++i) whole.push_back(first_weight(u, i));
    weights_.emplace_back(config_.unit(u).in_shards ? 0 : count);
    gradients_.emplace_back(config_.pool(Pool::kGradients).holds(u) ? 0 : count);
    squares_.emplace_back(static_cast<size_t>(config_.ranks));
    set(u, whole);
  }
  rows_.resize(static_cast<size_t>(elements(0)));
}

std::vector<ByteRange> SimulatedSteps::parts(int64_t unit, int64_t bytes) const {
  std::vector<ByteRange> out;
  for (int rank = 0; rank < config_.ranks; ++rank)
    out.push_back({sharding_.part(rank) * part_elements(unit) * bytes, part_elements(unit) * bytes});
  return out;
}

std::vector<ByteRange> SimulatedSteps::shards(int64_t unit, int64_t bytes) const {
  std::vector<ByteRange> out;
  const int64_t length = sharding_.copies() * part_elements(unit) * bytes;
  for (int place = 0; place < sharding_.group; ++place) out.push_back({place * length, length});
  return out;
}

std::span<float> SimulatedSteps::weights(int64_t unit) {
  std::vector<float>& whole = weights_[static_cast<size_t>(unit)];
  if (!config_.unit(unit).in_shards) return whole;
  return {reinterpret_cast<float*>(weight_shards_->use_in_place(unit)), static_cast<size_t>(elements(unit))};
}

std::span<float> SimulatedSteps::gradient(int64_t unit) {
  std::vector<float>& whole = gradients_[static_cast<size_t>(unit)];
  if (!config_.pool(Pool::kGradients).holds(unit)) return whole;
  return {reinterpret_cast<float*>(gradient_shards_->use(unit)), static_cast<size_t>(elements(unit))};
}

std::span<double> SimulatedSteps::squares(int64_t unit) {
  return squares_[static_cast<size_t>(unit)];
}

std::span<const float> SimulatedSteps::borrowed(int64_t unit) const {
  const float* const loan = loans_[static_cast<size_t>(unit)];
  LM_CHECK(loan != nullptr, "a unit is used without a loan");
  return {loan, static_cast<size_t>(elements(unit))};
}

void SimulatedSteps::run(int64_t step) {
  step_ = step;
  loss_ = 0;
  for (int64_t m = 0; m < config_.micro_batches; ++m)
    at(m).inputs.front() = tokens_of(setup_.seed, step, group_.rank(), m);
  walk(lists_.step(config_.micro_batches));
}

void SimulatedSteps::flush() {
  if (lists_.pending()) walk(lists_.flush());
  const SlotState slots = lists_.take_slots();
  for (const Pool pool : {Pool::kWeights, Pool::kGradients}) {
    for (const Slot& slot : slots.pools[static_cast<size_t>(pool)]) {
      if (slot.array < 0) continue;
      if (slot.changed) store(pool)->write_back(slot.array);
      store(pool)->forget(slot.array);
    }
  }
}

void SimulatedSteps::evaluate(int64_t step) {
  flush();
  at(0).inputs.front() = tokens_of(setup_.seed, step, 0, 0);
  evaluates_ = true;
  const ListWithSlots& forward = lists_.evaluation();
  walk(forward.list);
  evaluates_ = false;
  for (const Slot& slot : forward.slots.pools[static_cast<size_t>(Pool::kWeights)])
    if (slot.array >= 0) weight_shards_->forget(slot.array);
  const std::vector<uint64_t> all = group_.gather("evaluation", at(0).inputs.back());
  LM_CHECK(std::ranges::count(all, all.front()) == std::ssize(all), "all evaluate the same weights");
}

void SimulatedSteps::walk(const StepSchedule& list) {
  for (const Operation& op : list.operations) {
    if (!collective(op)) {
      carry_out(op);
      continue;
    }
    for (int times = setup_.enter(op); times > 0; --times) carry_out(op);
    setup_.met(op, left_by(op));
  }
}

bool SimulatedSteps::collective(const Operation& op) const {
  switch (op.kind) {
    case OperationKind::kReduceScatter:
    case OperationKind::kCheck:
    case OperationKind::kGather:
      return true;
    case OperationKind::kNorm:
      return sharding_.group > 1;
    case OperationKind::kFetch:
      return op.pool == Pool::kWeights;
    default:
      return has_experts(op);
  }
}

uint64_t SimulatedSteps::left_by(const Operation& op) {
  if (op.kind == OperationKind::kReduceScatter)
    return sharding_.group == 1 ? bits_of(std::span<const float>(gradient(op.unit))) : 0;
  if (op.kind == OperationKind::kNorm) return bits_of(std::span<const double>(squares(op.unit)));
  if (op.kind == OperationKind::kCheck) return bits_of(std::span<const float>(&scale_, 1));
  if (op.kind == OperationKind::kGather) return bits_of(std::span<const float>(weights(op.unit)));
  if (computes(op.kind)) return 0;
  const auto* const fetched = reinterpret_cast<const float*>(weight_shards_->use(op.array));
  return bits_of(std::span(fetched, static_cast<size_t>(elements(op.array))));
}

void SimulatedSteps::carry_out(const Operation& op) {
  switch (op.kind) {
    case OperationKind::kAcquire: {
      const bool shards = config_.unit(op.unit).in_shards;
      loans_[static_cast<size_t>(op.unit)] = shards ? reinterpret_cast<float*>(weight_shards_->use(op.unit))
                                                    : weights_[static_cast<size_t>(op.unit)].data();
      break;
    }
    case OperationKind::kRelease:
      loans_[static_cast<size_t>(op.unit)] = nullptr;
      break;
    case OperationKind::kForward:
    case OperationKind::kHead:
    case OperationKind::kRecompute:
    case OperationKind::kBackward:
    case OperationKind::kTableGradient:
      compute(op);
      break;
    case OperationKind::kAddRows:
      std::ranges::copy(rows_, gradient(0).begin());
      break;
    case OperationKind::kReduceScatter:
      reduce(op.unit);
      break;
    case OperationKind::kNorm:
      norm(op.unit);
      break;
    case OperationKind::kCheck:
      check();
      break;
    case OperationKind::kGather:
      gather(op.unit);
      break;
    case OperationKind::kUpdate:
      update(op);
      break;
    case OperationKind::kFetch:
      store(op.pool)->fetch(op.array, op.slot);
      break;
    case OperationKind::kAllocateSlot:
      store(op.pool)->allocate_slot(op.array, op.slot);
      break;
    case OperationKind::kWriteBack:
      store(op.pool)->write_back(op.array);
      break;
  }
}

bool SimulatedSteps::has_experts(const Operation& op) const {
  return experts_ != nullptr && computes(op.kind) && config_.unit(op.unit).role == UnitRole::kBody;
}

// As model/mixers/experts.cpp: every row to the rank that keeps its expert, and what that makes of it back.
uint64_t SimulatedSteps::by_owners(int64_t unit, uint64_t input) {
  const ExpertShare share = experts_->share();
  RoutedRows routed = routed_rows(input, share.ranks);
  std::vector<int32_t> all(static_cast<size_t>(share.ranks) * routed.start.size()), counts;
  experts_->gather_starts(unit - 1, routed.start, all.data());
  for (size_t i = 0; i + 1 < all.size(); ++i)
    if ((i + 1) % routed.start.size() != 0) counts.push_back(all[i + 1] - all[i]);
  const auto view = [](std::vector<uint64_t>& rows) {
    return view_of(rows.data(), DType::kI32, std::ssize(rows), 2);
  };
  const ExpertWaves waves(counts, share);
  for (int64_t wave = 0; wave < waves.count(); ++wave) {
    std::vector<uint64_t> here(static_cast<size_t>(waves.capacity()));
    const auto move = [&](bool back) {
      RowsOnTheWay way = waves.on_the_way(wave, back);
      way.from = view(back ? here : routed.rows), way.to = view(back ? routed.rows : here);
      experts_->move_rows(unit - 1, way);
    };
    move(false);
    for (const ExpertJob& job : waves.jobs(wave))
      for (int64_t row = job.at; row < job.at + job.rows; ++row)
        here[static_cast<size_t>(row)] = by_expert(here[static_cast<size_t>(row)], unit, job.expert);
    move(true);
  }
  return combined(routed.rows);
}

void SimulatedSteps::compute(const Operation& op) {
  Micro& micro = at(op.micro);
  const auto u = static_cast<size_t>(op.unit);
  if (op.kind == OperationKind::kBackward && op.unit == 0) {
    for (size_t i = 0; i < rows_.size(); ++i) {
      const float one = gradient_of(micro.inputs[0], micro.back, 0, static_cast<int64_t>(i));
      rows_[i] = op.micro == 0 ? one : rows_[i] + one;
    }
    return;
  }
  const std::span<const float> unit = borrowed(op.unit);
  const uint64_t own = bits_of(unit);
  const uint64_t bits = has_experts(op) ? behind(own, by_owners(op.unit, micro.inputs[u])) : own;
  if (op.kind == OperationKind::kForward) micro.borrowed[u] = bits;
  if (op.kind == OperationKind::kRecompute)
    LM_CHECK(micro.borrowed[u] == bits, "what is computed once more has the weights of its forward");
  if (op.kind == OperationKind::kForward || op.kind == OperationKind::kHead) {
    const bool tied = op.kind == OperationKind::kHead && config_.tied;
    micro.inputs[u + 1] = behind(micro.inputs[u], tied ? behind(bits, bits_of(borrowed(0))) : bits);
  }
  if (op.kind == OperationKind::kHead && !evaluates_) {
    loss_ += loss_of(micro.inputs[u + 1]);
    micro.back = mixed(micro.inputs[u + 1]);
  }
  if ((op.kind == OperationKind::kHead && !evaluates_) || op.kind == OperationKind::kBackward) {
    add_gradient(op, unit);
    micro.back = behind(micro.back, bits);
  }
}

void SimulatedSteps::add_gradient(const Operation& op, std::span<const float> weights) {
  const Micro& micro = at(op.micro);
  const std::span<float> to = gradient(op.unit);
  for (size_t i = 0; i < to.size(); ++i) {
    const float one = gradient_of(micro.inputs[static_cast<size_t>(op.unit)], micro.back, weights[i],
                                  static_cast<int64_t>(i));
    to[i] = op.micro == 0 ? one : to[i] + one;
  }
}

// As optim/gradients.cpp.
void SimulatedSteps::reduce(int64_t unit) {
  const std::vector<ByteRange> ranges = parts(unit, kFloat);
  const std::span<float> all = gradient(unit);
  float* const own = all.data() + first_of_part(unit);
  const char* const what = reduce_scatters_.of(unit);
  if (levels_) {
    levels_->reduce_scatter(
        what, bytes_of(all), ranges,
        {.element_bytes = kFloat,
         .inside = add_up,
         .across = [&](int64_t first, int64_t elements, std::span<const std::byte* const> from) {
           add_up(own + first, elements, from);
         }});
  } else {
    group_.reduce_scatter(what, bytes_of(all), ranges,
                          [&](int64_t offset, int64_t bytes, std::span<const std::byte* const> from) {
                            add_up(own + offset / kFloat, bytes / kFloat, from);
                          });
  }
  if (sharding_.copies() > 1) group_.share_copies(sharding_.group, shares_.of(unit), bytes_of(all), ranges);
}

// A number for each part, as there is one for each granule.
void SimulatedSteps::norm(int64_t unit) {
  const std::span<const float> all = gradient(unit);
  const std::span<double> sums = squares(unit);
  const ByteRange own = shards(unit, 1)[static_cast<size_t>(sharding_.place(group_.rank()))];
  const int64_t part = part_elements(unit);
  for (int64_t at = own.begin; at < own.begin + own.bytes; at += part) {
    const std::span<const float> elements = all.subspan(static_cast<size_t>(at), static_cast<size_t>(part));
    sums[static_cast<size_t>(at / part)] = square_of(elements);
  }
  if (sharding_.group == 1) return;
  std::vector<ByteRange> ranges = shards(unit, kDouble);
  for (ByteRange& one : ranges) one.begin /= part, one.bytes /= part;
  group_.all_gather(norms_.of(unit), bytes_of(sums), ranges);
}

void SimulatedSteps::check() {
  double loss = 0, square = 0;
  for (const double one : group_.gather("loss", loss_)) loss += one;
  for (const std::vector<double>& unit : squares_) square += std::accumulate(unit.begin(), unit.end(), 0.0);
  LM_CHECK(loss > 0 && square > 0, "a step has a loss and a gradient");
  if (config_.clip == Clip::kGlobal) scale_ = scale_for(square);
}

void SimulatedSteps::gather(int64_t unit) {
  group_.all_gather(gathers_.of(unit), bytes_of(weights(unit)), shards(unit, kFloat));
}

void SimulatedSteps::update(const Operation& op) {
  const std::span<const double> sums = squares(op.unit);
  if (config_.clip == Clip::kBlock) scale_ = scale_for(std::accumulate(sums.begin(), sums.end(), 0.0));
  const std::span<float> to = weights(op.unit);
  const std::span<const float> sum = gradient(op.unit);
  const ByteRange own = shards(op.unit, 1)[static_cast<size_t>(sharding_.place(group_.rank()))];
  const int64_t tiles = config_.unit(op.unit).tiles(), tile = op.tile - config_.unit(op.unit).first_tile;
  const int64_t end = own.begin + own.bytes * (tile + 1) / tiles;
  for (auto i = static_cast<size_t>(own.begin + own.bytes * tile / tiles); i < static_cast<size_t>(end); ++i)
    to[i] = updated(to[i], sum[i], scale_);
}

std::vector<float> SimulatedSteps::own_part(int64_t unit) {
  std::vector<float> out(static_cast<size_t>(part_elements(unit)));
  const int64_t first = first_of_part(unit);
  if (config_.unit(unit).in_shards) {
    weight_shards_->read(unit, first * kFloat, std::as_writable_bytes(std::span(out)));
  } else {
    std::ranges::copy(
        std::span(weights_[static_cast<size_t>(unit)]).subspan(static_cast<size_t>(first), out.size()),
        out.begin());
  }
  return out;
}

void SimulatedSteps::set(int64_t unit, std::span<const float> whole) {
  if (!config_.unit(unit).in_shards) {
    std::ranges::copy(whole, weights_[static_cast<size_t>(unit)].begin());
    return;
  }
  weight_shards_->allocate_slot(unit, 0);
  std::memcpy(weight_shards_->use(unit), whole.data(), whole.size_bytes());
  weight_shards_->write_back(unit);
  weight_shards_->forget(unit);
}

std::vector<float> SimulatedSteps::all_weights() {
  std::vector<float> out;
  for (int64_t u = 0; u < std::ssize(config_.units); ++u) {
    const bool shards = config_.unit(u).in_shards;
    if (shards) weight_shards_->fetch(u, 0);
    const auto* const whole = shards ? reinterpret_cast<const float*>(weight_shards_->use(u))
                                     : weights_[static_cast<size_t>(u)].data();
    out.insert(out.end(), whole, whole + elements(u));
    if (shards) weight_shards_->forget(u);
  }
  return out;
}

}  // namespace lm::test
