// From a block's memory to its layers: views of each tensor of the layout over the weights on loan and the
// block's gradient array. Where each tensor lies is looked up by name once, when a ModelBinding is made; what
// a loan costs then is some dozen additions.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "model/embedding.h"
#include "model/expert_fetch.h"
#include "model/head_loss.h"
#include "model/transformer.h"
#include "spec/block_layout.h"

namespace lm {

// Where the arrays of a block (or of a segment of a chunked head) are right now. `gradients` is null in
// evaluation; unused parts may be null.
struct BlockMemory {
  std::byte* trainable = nullptr;  // working weights, flat_elements of what is trained's type
  std::byte* frozen = nullptr;     // frozen_bytes, or common_bytes of them
  std::byte* own = nullptr;        // own_bytes of these; null: they lie behind the others
  std::byte* gradients = nullptr;  // flat_elements of the gradient type
  // Of the block: what the memory begins with.
  int64_t first = 0, first_frozen_byte = 0, first_own_byte = 0;
  std::byte* frozen_at(int64_t byte) const {  // of the block's frozen array; null: it is not here
    if (own != nullptr && byte >= first_own_byte) return own + (byte - first_own_byte);
    return frozen == nullptr ? nullptr : frozen + (byte - first_frozen_byte);
  }
  // Of a block whose experts are fetched by routing; null: all of it is there.
  ExpertFetch* experts = nullptr;
  // Of a layout in which other ranks keep some of the experts.
  ExpertExchange* exchange = nullptr;
};

struct BindOptions {
  DType dtype = DType::kBF16;
  bool fp32_adapters = false;  // what is trained is fp32 whatever dtype says
  DType gradient_dtype = DType::kF32;
  // Of dropout; `training` off: there is none.
  bool training = false;
  uint64_t seed = 0;
  int64_t step = 0;
};

class ModelBinding {
 public:
  // `adapter` null: full fine-tuning. Nothing of the arguments is kept.
  ModelBinding(const ModelSpec& spec, const ModelLayout& layout, const AdapterSpec* adapter);

  Embedding embedding(const BlockMemory& memory, const BindOptions& options) const;
  DropoutMask embedding_dropout(const BindOptions& options) const;
  TransformerBlock transformer(int64_t block, const BlockMemory& memory, const BindOptions& options) const;
  Norm final_norm(const BlockMemory& memory, const BindOptions& options) const;
  // `tied`: what the head shares with the embedding; else unused.
  Head head(const BlockMemory& memory, const Embedding& tied, const BindOptions& options) const;
  // `memory` holds this unit, a segment of the head's matrix.
  HeadSegment segment(const Unit& unit, const BlockMemory& memory, const BindOptions& options) const;

 private:
  struct EncodedPart {
    int64_t rows = 0;
    std::array<int64_t, kMostPieces> pieces = {};  // offsets; -1: none
  };
  struct Place {
    int64_t offset = 0;  // as a TensorPlace's
    bool frozen = false;
    int64_t rows = 0, columns = 0;  // 0 rows: the model has no such tensor
    bool fp32 = false;              // as Parameter has it
    // Of a frozen tensor that has to be materialised.
    EncodingKind encoding = EncodingKind::kPlain;
    std::array<EncodedPart, kMostParts> parts = {};
  };
  struct AdapterPlace {
    int64_t first = 0, rows = 0;  // of the projection's output
    Place a, b, magnitude, start_a, start_b;
    uint32_t key = 0;  // of its dropout: layer and module
    float scale = 1;
  };
  struct ScalePlace {
    int64_t first = 0, rows = 0;  // of the projection's output
    Place factors;
  };
  struct LinearPlace {
    Place weight, bias;
    std::vector<AdapterPlace> adapters;
    std::vector<ScalePlace> biases = {}, scales = {};
    Place input_scale = {};
  };
  struct NormPlace {
    Place weight, bias;
  };
  // The tensors of a sublayer; those of its mixer in the order in which the mixer visits its parts.
  struct SublayerPlace {
    SublayerSpec spec;
    NormPlace norm, norm_after, norm_joined;
    std::vector<Place> norms;
    std::vector<LinearPlace> linears;
    std::vector<Place> prefixes, buffers = {}, factors = {};
    Place sinks = {};
  };
  struct LayerPlace {
    std::vector<SublayerPlace> sublayers;
    Place scalar;
  };
  class Finder;
  class Binder;

  // What is used as this tensor: the copy that is trained in its place, if there is one.
  static Place find(const BlockLayout& layout, const std::string& name);
  static Place place_of(const TensorPlace* place);  // null: the model has no such tensor
  static Param bind(const Place& place, const BlockMemory& memory, const BindOptions& options);
  static Norm bind(const NormSpec& spec, const NormPlace& place, const BlockMemory& memory,
                   const BindOptions& options);
  Linear bind(const LinearPlace& linear, const BlockMemory& memory, const BindOptions& options) const;

  float dropout_ = 0;  // of the adapters
  double embedding_dropout_ = 0;
  NormSpec final_norm_, input_norm_spec_;
  Place embedding_, tokens_, positions_, prompt_, input_table_, input_projection_, head_;
  Place table_a_, table_b_, head_a_, head_b_;  // of adapters of the embedding and of the head
  float table_scale_ = 1, head_scale_ = 1;
  std::array<LinearPlace, 3> encoder_;  // of the prompt
  std::vector<RowRun> runs_;            // of tokens_
  NormPlace norm_, input_norm_;
  std::vector<LayerPlace> layers_;
};

}  // namespace lm
