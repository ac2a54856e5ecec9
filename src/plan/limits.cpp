#include "plan/limits.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {

void refuse_many_threads(const char* key, std::optional<int64_t> threads, const Machine& machine) {
  constexpr int64_t kOfCore = 4, kAlways = 64;
  const int64_t most = std::max(kOfCore * machine.cores, kAlways);
  if (!threads || *threads <= most) return;
  throw setting_error(fmt::format("{} = {}: expected at most {} here, where this process has {} {}", key,
                                  *threads, most, machine.cores, machine.cores == 1 ? "core" : "cores"),
                      key, "leave it out: as many threads as there are cores are the fastest");
}

void refuse_products(Products products, DeviceType device, const Machine& machine) {
  if (products == Products::kF32) return;
  const ComputeCapability card =
      device == DeviceType::kCuda ? machine.gpus.front().capability : ComputeCapability{};
  if (device == DeviceType::kCuda && (!card.known() || card.major >= 8)) return;
  throw setting_error(std::string("model.products = \"tf32\": TF32 products are made by GPUs of compute "
                                  "capability 8.0 or more, and this is ") +
                          (device == DeviceType::kCpu ? "the CPU" : "a GPU of " + card.text()),
                      "model.products", "leave it out: fp32 products are made everywhere");
}

double router_aux_loss(const TrainConfig& train, const ModelSpec& spec) {
  return train.router_aux_loss.value_or(spec.scores() ? 0 : spec.router_aux_loss);
}

bool has_router_pass(const TrainConfig& train, const ModelSpec& spec, const StepConfig& step) {
  return router_aux_loss(train, spec) != 0 && step.micro_batches > step.group;
}

namespace {

bool has_sigmoid_router(const LayerSpec& layer) {
  const auto* const experts = layer.find<ExpertsSpec>();
  return experts != nullptr && experts->scores == RouterScores::kSigmoid;
}

}  // namespace

void refuse_router_loss(const TrainConfig& train, const ModelSpec& spec) {
  const auto has = [](const LayerSpec& layer) { return layer.find<ExpertsSpec>() != nullptr; };
  const double coefficient = router_aux_loss(train, spec);
  if (coefficient == 0) return;
  const bool experts = std::ranges::any_of(spec.layers, has);
  const bool sigmoid = std::ranges::any_of(spec.layers, has_sigmoid_router);
  if (experts && !sigmoid) return;
  const std::string of = fmt::format("train.router_aux_loss = {:g}", coefficient);
  std::string what = of + " balances experts, and a model of type " + spec.model_type + " has none";
  std::string next = "leave it out";
  if (sigmoid) {
    what = of + " is of a softmax over all experts, and a router of " + spec.model_type +
           " has sigmoid scores, which its correction bias balances";
    next = "set it to 0";
  }
  throw setting_error(what, "train.router_aux_loss", next);
}

void refuse_many_micro_batches(const Config& config, const NumericsPlan& n) {
  constexpr int64_t kMost = 1 << 16;
  if (n.micro_batches <= kMost) return;
  throw setting_error(fmt::format("train.global_batch = {} makes {} micro-batches of {} on a rank: expected "
                                  "at most {}",
                                  config.train.global_batch, n.micro_batches, n.micro_batch, kMost),
                      "train.global_batch", "lower it, raise train.micro_batch, or use more ranks");
}

void refuse_short_tiles(int64_t tile, int64_t least) {
  if (tile >= least) return;
  throw setting_error(fmt::format("io.tile = {} cuts the optimizer's state into more than {} "
                                  "tiles",
                                  format_bytes(tile), kMostTiles),
                      "io.tile",
                      fmt::format("leave it out, or set it to \"{}MiB\" or more", ceil_div(least, kMiB)));
}

void refuse_large_group(int64_t micro_batches) {
  throw setting_error(fmt::format("train.update = \"in_backward\" passes all micro-batches of a step through "
                                  "a block together, at most {}, and there are {}",
                                  kMostInGroup, micro_batches),
                      "train.update",
                      "lower train.global_batch, raise train.micro_batch, or leave train.update out");
}

}  // namespace lm
