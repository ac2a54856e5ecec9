#include "synthetic_run.h"

#include <algorithm>

#include "base/philox.h"
#include "gpu_pattern.h"
#include "launcher/machine/machine_survey.h"
#include "plan/base_encoding.h"
#include "plan/gemm_library.h"
#include "plan/state_catalogue.h"
#include "weights/load_store.h"

namespace lm {
namespace {

// The peers learn every position but the last of a sequence, so these are the targets here.
StepBatches random_batches(int64_t sequences, int64_t each, int64_t length, int64_t vocab) {
  const uint64_t key = philox_key(1, Purpose::kInit, 0, 0);
  StepBatches out;
  for (int64_t s = 0; s < sequences; ++s) {
    if (s % each == 0) out.micro.emplace_back();
    Batch& batch = out.micro.back();
    batch.document_start.push_back(static_cast<int32_t>(s % each * length));
    for (int64_t p = 0; p < length; ++p) {
      const auto index = static_cast<uint64_t>(s * length + p);
      batch.token.push_back(static_cast<int32_t>(philox_at(key, index, 0, 0) % static_cast<uint32_t>(vocab)));
      batch.position.push_back(static_cast<int32_t>(p));
      batch.sample.push_back(static_cast<int32_t>(s));
      batch.target.push_back(-1);
      if (p > 0) batch.target[batch.target.size() - 2] = batch.token.back();
    }
    out.target_tokens += length - 1;
  }
  for (Batch& batch : out.micro) batch.document_start.push_back(static_cast<int32_t>(batch.token.size()));
  return out;
}

// A rank's micro-batches of them, as the loader gives them.
void keep_own(const Group& group, StepBatches& batches) {
  const int64_t count = std::ssize(batches.micro), rank = group.rank(), ranks = group.ranks();
  batches.micro.erase(batches.micro.begin() + count * (rank + 1) / ranks, batches.micro.end());
  batches.micro.erase(batches.micro.begin(), batches.micro.begin() + count * rank / ranks);
}

// Matrices and embeddings about N(0, 0.02), norms 1, biases 0; adapters are not touched. Of quantized
// matrices codes are any, and scales about 0.02, too: the upper half of an fp32 number is one of bf16.
void fill_with_pattern(const ModelLayout& layout, DType dtype, StreamView stream, WeightStore& store) {
  const PatternTile small(dtype, stream, 0.02f), ones(dtype, stream, 0, 1);
  std::optional<OpenUnit> open;  // one at a time: units off the device pass through one slot
  for (size_t block = 0; block < layout.blocks.size(); ++block) {
    for (const TensorPlace& place : layout.blocks[block].tensors) {
      const Parameter& p = place.parameter;
      if (in_adapter(p.role)) continue;
      for (const int64_t unit : store.units_of(static_cast<int64_t>(block), place)) {
        if (!open || open->unit() != unit) {
          if (open) open->close();
          open.reset();
          open.emplace(store.open(unit, true));
        }
        const Unit& range = store.units()[static_cast<size_t>(unit)];
        const int64_t rows = range.rows > 0 ? range.rows : p.rows;
        const int64_t bytes = rows * p.columns * static_cast<int64_t>(dtype_size(dtype));
        if (place.encoded()) {
          const FrozenPiece& last = place.pieces.back();
          small.fill(open->tensor(place), last.offset + last.bytes - place.offset);
        } else if (p.kind == ParameterKind::kBias) {
          zero_bytes(open->tensor(place), bytes, stream);
        } else {
          (p.kind == ParameterKind::kNorm ? ones : small).fill(open->tensor(place), bytes);
        }
      }
    }
  }
  if (open) open->close();
  open.reset();
  synchronize(stream);  // the tiles end here
}

AdapterSpec all_linear(const Config& config) {
  return {.r = 16,
          .alpha = 16,
          .rslora = false,
          .dora = config.lora.dora,
          .dropout = 0,
          .targets = resolve_targets(llama_names(), {"all-linear"}, "lora.targets")};
}

}  // namespace

Machine roomy_machine(int threads) {
  Machine machine = with_imagined(survey_machine({}), {.gpu = {}, .host_bytes = int64_t{1} << 40});
  machine.cores = threads;
  return machine;
}

int64_t planned_gemm_shapes(const ModelSpec& spec, bool lora, const Config& config) {
  const AdapterSpec adapter = all_linear(config);
  const AdapterSpec* const trained = lora ? &adapter : nullptr;
  const Machine machine = roomy_machine(static_cast<int>(*config.run.threads));
  const ModelLayout layout = make_layout(spec, trained, DType::kBF16, base_encoding(config.model));
  return draft_plan({config, spec, trained, layout, DeviceType::kCpu}, machine).gemm_shapes;
}

SyntheticRun::SyntheticRun(SyntheticSetup setup, const Machine& machine, StreamView stream)
    : setup_(std::move(setup)),
      stream_(stream),
      gemm_shape_bytes_(gemm_shape_bytes(machine)),
      adapter_(all_linear(setup_.config)),
      layout_(make_layout(setup_.spec, setup_.lora ? &adapter_ : nullptr, DType::kBF16,
                          base_encoding(setup_.config.model))) {
  const Config& config = setup_.config;
  const AdapterSpec* const trained = setup_.lora ? &adapter_ : nullptr;
  const World world{.ranks = setup_.group != nullptr ? setup_.group->ranks() : 1};
  plan_ = make_plan({config, setup_.spec, trained, layout_, stream.device, {}, setup_.update_on_host},
                    machine, world);
  if (setup_.slots > 0) {
    // Memory follows the placement, the step's list the step.
    plan_.placement.pool(Pool::kOptimizer).slots = setup_.slots;
    plan_.step.pool(Pool::kOptimizer).slots = setup_.slots;
  }
  std::vector<SwapPath> paths;
  for (const std::string& path : config.offload.paths) paths.push_back({path, 1});
  rank_ = std::make_unique<Rank>(RankSetup{.spec = setup_.spec,
                                           .layout = layout_,
                                           .adapter = trained,
                                           .optimizer = config.optimizer,
                                           .plan = plan_,
                                           .seed = 1,
                                           .max_length = config.data.max_length,
                                           .tokens_per_step = tokens_per_step(),
                                           .max_grad_norm = 1.0,
                                           .swap_paths = paths,
                                           .engine = setup_.engine,
                                           .group = setup_.group,
                                           .device_group = setup_.device_group,
                                           .kernels = setup_.kernels,
                                           .trace = setup_.trace},
                                 stream);
  const LoadSetup load{setup_.spec, layout_, DType::kBF16, stream, plan_.numerics.threads};
  if (setup_.pattern) {
    fill_with_pattern(layout_, DType::kBF16, stream, rank_->weights());
  } else {
    initialise_weights(load, 1, rank_->weights());
  }
  if (setup_.lora && adapter_.dora)
    initialise_from_base(load, 1, {.directory = "", .dtype = DType::kBF16}, adapter_, rank_->weights());
  else if (setup_.lora)
    initialise_adapter(load, 1, rank_->weights());
  rank_->weights_ready();
  batches_ = random_batches(config.train.global_batch, plan_.numerics.micro_batch, config.data.max_length,
                            setup_.spec.vocab);
  if (setup_.group != nullptr) keep_own(*setup_.group, batches_);
}

double SyntheticRun::planned_seconds(const Machine& machine) const {
  return make_plan({setup_.config,
                    setup_.spec,
                    setup_.lora ? &adapter_ : nullptr,
                    layout_,
                    stream_.device,
                    {},
                    setup_.update_on_host},
                   machine)
      .step_seconds;
}

int64_t SyntheticRun::class_bytes(std::string_view name) const {
  const auto found = std::ranges::find(plan_.classes, name, &ClassBytes::name);
  return found == plan_.classes.end() ? 0 : found->bytes;
}

int64_t SyntheticRun::planned_host_bytes() const {
  const int64_t planned = plan_.peak.host - class_bytes("save buffers");
  if (plan_.gemm_shapes == 0) return planned;
  const AdapterSpec* const trained = setup_.lora ? &adapter_ : nullptr;
  // All batches have one number of rows.
  const int64_t used = gemm_shapes({setup_.spec, layout_, trained}, plan_.step, plan_.micro_tokens,
                                   plan_.numerics.micro_batches);
  return planned - std::max<int64_t>(plan_.gemm_shapes - used, 0) * gemm_shape_bytes_;
}

int64_t SyntheticRun::tokens_per_step() const {
  return setup_.config.train.global_batch * setup_.config.data.max_length;
}

StepResult SyntheticRun::begin_step() {
  TrainStep& step = rank_->step();
  step.start(batches_, ++steps_, 1e-5);
  const bool before = std::exchange(unread_, step.runs_ahead() && steps_ > 1 && !step.traced());
  StepResult result;  // of none, where the first is left behind
  if (before) result = step.finish();
  if (!unread_) result = step.finish();
  return result;
}

StepResult SyntheticRun::step() {
  StepResult result = begin_step();
  if (std::exchange(unread_, false)) result = rank_->step().finish();
  synchronize(stream_);
  return result;
}

}  // namespace lm
