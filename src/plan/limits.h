// What a configuration of legal keys may not ask of this machine, refused before anything is made: each
// throws Error(10) that names the key and what it may be. They bound what a step's lists of operations and
// arrays have, and so the work of a plan.
#pragma once

#include <optional>

#include "plan/machine.h"
#include "plan/numerics.h"

namespace lm {

// Micro-batches of a step that may pass a block together where all of them have to (updates inside backward,
// gradients in shards): each has an input of every block, an array of its own if it is off the device.
inline constexpr int64_t kMostInGroup = 1 << 10;
// Tiles of optimizer state: each is an operation of the step's list, with a place and a checksum of its own.
inline constexpr int64_t kMostTiles = 1 << 15;

// Each thread costs memory and a start, and beyond a few on each core they only wait for each other. Some are
// allowed: who repeats a run of a larger machine wants its number, which decides bits.
void refuse_many_threads(const char* key, std::optional<int64_t> threads, const Machine& machine);
// What only some GPUs multiply.
void refuse_products(Products products, DeviceType device, const Machine& machine);
// The coefficient of the loss that balances experts.
double router_aux_loss(const TrainConfig& train, const ModelSpec& spec);
// Whether it costs a step a forward pass of all micro-batches: of several groups of them, since the first
// backward pass needs what all have chosen.
bool has_router_pass(const TrainConfig& train, const ModelSpec& spec, const StepConfig& step);
// That loss of a model without experts, or of routers whose corrections balance them.
void refuse_router_loss(const TrainConfig& train, const ModelSpec& spec);
// A step's list has some operations for each micro-batch and layer.
void refuse_many_micro_batches(const Config& config, const NumericsPlan& n);
// `least`: bytes of a tile where there are kMostTiles of them.
void refuse_short_tiles(int64_t tile, int64_t least);
// Only updates inside backward are left to a step of so many micro-batches.
void refuse_large_group(int64_t micro_batches);

}  // namespace lm
