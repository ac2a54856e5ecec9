#include "synthetic_run.h"

#include "base/philox.h"
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

}  // namespace

SyntheticRun::SyntheticRun(SyntheticSetup setup, const Machine& machine, StreamView stream)
    : setup_(std::move(setup)),
      stream_(stream),
      adapter_{.r = 16,
               .alpha = 16,
               .rslora = false,
               .dropout = 0,
               .targets = resolve_targets({"all-linear"}, "lora.targets")},
      layout_(make_layout(setup_.spec, setup_.lora ? &adapter_ : nullptr, DType::kBF16)) {
  const Config& config = setup_.config;
  const AdapterSpec* const trained = setup_.lora ? &adapter_ : nullptr;
  plan_ = make_plan(config, setup_.spec, trained, layout_, machine, stream.device, {}, setup_.update_on_host);
  if (setup_.slots > 0) plan_.placement.pool(Pool::kOptimizer).slots = setup_.slots;
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
                                           .engine = setup_.engine},
                                 stream);
  const LoadSetup load{setup_.spec, layout_, DType::kBF16, stream, plan_.numerics.threads};
  initialise_weights(load, 1, rank_->weights());
  if (setup_.lora) initialise_adapter(load, 1, rank_->weights());
  rank_->weights_ready();
  batches_ = random_batches(config.train.global_batch, plan_.numerics.micro_batch, config.data.max_length,
                            setup_.spec.vocab);
}

double SyntheticRun::planned_seconds(const Machine& machine) const {
  return make_plan(setup_.config, setup_.spec, setup_.lora ? &adapter_ : nullptr, layout_, machine,
                   stream_.device, {}, setup_.update_on_host)
      .step_seconds;
}

int64_t SyntheticRun::tokens_per_step() const {
  return setup_.config.train.global_batch * setup_.config.data.max_length;
}

StepResult SyntheticRun::step() {
  const StepResult result = rank_->step().run(batches_, ++steps_, 1e-5);
  synchronize(stream_);
  return result;
}

}  // namespace lm
