// A model trained for a few steps on one device, and everything about it that another device should give,
// too: logits, losses, norms, every gradient, and by how much every weight has changed. Values in fp32 host
// memory, by Hugging Face names.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "config/config.h"
#include "plan/plan.h"

namespace lm {

inline constexpr int64_t kMaxLength = 48;  // tokens of a micro-batch, all documents together
inline constexpr int kSteps = 5;

using DocumentLengths = std::vector<std::vector<int64_t>>;  // their lengths, of each micro-batch

struct Training {
  std::string name;
  ModelSpec spec;
  DType dtype = DType::kF32;
  DType gradients = DType::kF32;
  Master master = Master::kSplit;
  Clip clip = Clip::kGlobal;
  bool lora = false;
  bool adapted_experts = false;  // of LoRA: experts have pairs, too
  bool fp32_adapters = false;    // of LoRA, beside a model of 16 bits
  double dropout = 0;
  double router_aux_loss = 0;
  bool recompute = false;
  bool weighted = false;  // targets have weights in the loss
  DocumentLengths documents = {{20, 9, 17}};
  // Tiers on the device's side only: on the CPU everything stays in its memory.
  OffloadTier optimizer = OffloadTier::kNone, gradients_tier = OffloadTier::kNone,
              weights = OffloadTier::kNone, activations = OffloadTier::kNone;
  std::optional<bool> update_on_host = {};
  int64_t row_chunk = 16;  // rows of logits at once; 0: the plan's
};

using Tensors = std::map<std::string, std::vector<float>>;

struct Outcome {
  std::vector<float> logits;  // of every row of the first micro-batch, before the first step
  // After so many tokens of its first document, by a decoder that goes on from what it has cached.
  std::vector<std::pair<int64_t, std::vector<float>>> continued;
  std::vector<double> losses, norms;
  std::vector<double> figures;  // of routers, of all steps
  double evaluated = 0;         // nll of the first micro-batch, after the last step
  Tensors initialised;          // weights as initialise_weights leaves them
  Tensors gradients;            // of the first step; empty where they live off the device
  Tensors change;               // of trainable weights, over all steps
  int64_t arena_bytes = 0, arena_planned = 0;
  int64_t head_segments = 0;
};

// A small model of which nothing is special; `family` says what it has.
ModelSpec small_model(const std::string& family);
const std::vector<std::string>& families();
// Those whose layers are of another shape than Llama's (tests/support/family_shapes.h).
const std::vector<std::string>& shapes();

// `stream` is start_torch's, or the CPU's.
Outcome train(const Training& training, StreamView stream);

// Device memory of a rank before its first step: what the plan counts, its reserve apart, and what CUDA has
// less.
struct DeviceMemory {
  int64_t planned = 0, taken = 0;
};
DeviceMemory device_memory(const Training& training, StreamView stream);

}  // namespace lm
