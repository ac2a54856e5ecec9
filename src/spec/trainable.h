// What is trained, as a list: each block's layout has an entry for every trainable tensor, in the order of
// its flat array. Who looks for the tensors that belong to a weight asks the list (BlockLayout::beside); no
// code relies on their order or reads their names. Values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lm {

// What a trained tensor is to its owner. A switch over it has no default: the compiler finds every place that
// a new role concerns.
enum class TrainableRole : uint8_t {
  kWeight,  // the model's own tensor: it owns itself
  kLoraA,   // W' = W + s B A of a matrix of the files
  kLoraB,
  kMagnitude,    // DoRA: the lengths of the rows of W', W' = m (W + s B A) / |W + s B A|
  kOutputScale,  // IA3: factors of what a linear layer computes, its bias included
  kInputScale,   // IA3: factors of what a linear layer reads
  kReplacement,  // LN tuning: a copy of a norm's weight or bias, which is used in its place
  kPrefix,       // prefix tuning: a layer's keys and values of the virtual tokens before each document
  kPrompt,       // prompt tuning: the embeddings of these tokens; P-tuning: what the encoder makes them of
  kEncoder,      // P-tuning: a weight or a bias of the encoder
  kWhole,      // a tensor of the model that is trained beside adapters, and in their files: a head of scores
               // and what lora.also names
  kTokenRows,  // rows of the embedding, which are used in place of its own
  kBias,       // a copy of a linear layer's bias, which is used in its place
  kStartA,     // PiSSA: A and -B as they began. Frozen, and in no file: W' = W + s (B A - B0 A0)
  kStartB,
};

// Whether tensors of this role are an adapter's, and in its files; else they are the model's.
constexpr bool in_adapter(TrainableRole role) {
  switch (role) {
    case TrainableRole::kWeight:
      return false;
    case TrainableRole::kLoraA:
    case TrainableRole::kLoraB:
    case TrainableRole::kMagnitude:
    case TrainableRole::kOutputScale:
    case TrainableRole::kInputScale:
    case TrainableRole::kReplacement:
    case TrainableRole::kPrefix:
    case TrainableRole::kPrompt:
    case TrainableRole::kEncoder:
    case TrainableRole::kWhole:
    case TrainableRole::kTokenRows:
    case TrainableRole::kBias:
    case TrainableRole::kStartA:
    case TrainableRole::kStartB:
      return true;
  }
  return false;
}

// Whether tensors of this role change another tensor of the model; else they are tensors of it.
constexpr bool adapts(TrainableRole role) {
  return in_adapter(role) && role != TrainableRole::kWhole;
}

// Whether a tensor of this role is frozen, and computed from the base whenever a run is opened
// (weights/principal_pairs.h).
constexpr bool is_start(TrainableRole role) {
  return role == TrainableRole::kStartA || role == TrainableRole::kStartB;
}

struct Trainable {
  size_t tensor = 0;  // its place in BlockLayout::tensors
  TrainableRole role = TrainableRole::kWeight;
  // The tensor that it belongs to, and which of its parts; behind BlockLayout::tensors one of `elsewhere`.
  size_t owner = 0, part = 0;
  bool decay = false;  // optimizer.weight_decay applies, unless a parameter group has another
  bool operator==(const Trainable&) const = default;
};

}  // namespace lm
