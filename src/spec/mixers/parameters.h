// The parameters of one mixer as the block's parameter list needs them: names within the layer, shapes, and
// the parts of which a matrix is made. Values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/norm_spec.h"

namespace lm {

// A matrix as the program holds it: projections that share an input are one matrix, so that they are one
// GEMM.
struct MatrixSpec {
  // One projection: rows of the matrix, and the name by which a family's NameMap finds its tensors.
  struct Part {
    const char* name = "";  // "attn.q"
    int64_t rows = 0;
  };
  std::string name;  // "attn.qkv"
  // It multiplies the output of the sublayer's norm; else what the mixer made of that.
  bool reads_norm = false;
  int64_t columns = 0;
  bool bias = false;
  std::vector<Part> parts = {};  // in row order
  int64_t expert = -1;           // whose matrix it is: its number is in the files' names; -1: nobody's
  int64_t experts = 0;           // how many of them have one
  bool plain = false;            // never quantized
};

// A norm inside a mixer.
struct InnerNorm {
  const char* name = "";  // of its weight: "attn.q_norm"
  int64_t width = 0;
  NormSpec spec = {};
  int64_t own = 0;  // heads that have a part of the weight each, which the files hold as [own, width / own]
};

// A vector inside a mixer that is neither a norm's nor a bias.
struct InnerVector {
  const char* name = "";  // "attn.sinks"
  int64_t width = 0;
};

struct MixerParameters {
  std::vector<MatrixSpec> matrices;
  std::vector<InnerNorm> norms;
  std::vector<InnerVector> buffers =
      {};  // fp32 that the files hold and nobody trains, 0 where a model is fresh
  std::vector<InnerVector> sinks = {};    // logits
  std::vector<InnerVector> factors = {};  // 1 where a model is fresh
};

}  // namespace lm
