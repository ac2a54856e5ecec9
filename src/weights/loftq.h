// Where adapters of a quantised model begin (Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization", one
// step of it): with the matrix of rank r that is nearest to what quantising lost, W - Q(W). Near is what
// changes a layer's output least: columns count by how large the layer's inputs are there. No data is needed
// for it; the sizes follow from the norms' gains and from the matrices that make the inputs.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "spec/block_layout.h"
#include "weights/encode.h"

namespace lm {

// Elements of a tensor of the files, part `part` of `place`, before it is quantised.
using PartElements = std::function<MatrixElements(const TensorPlace& place, size_t part)>;

struct LoftqSetup {
  const ModelSpec& spec;
  double scale = 1;  // of the adapter's output
  DType dtype = DType::kBF16;
  int threads = 1;
  PartElements elements;  // of `dtype`, which codes are made of
};

// A transformer block, whose matrices are encoded. One thread calls; `setup`, `layer` and `block` are the
// caller's and outlive it.
class LoftqBlock {
 public:
  LoftqBlock(const LoftqSetup& setup, const LayerSpec& layer, const BlockLayout& block)
      : setup_(setup), layer_(layer), block_(block) {}

  // The adapter of part `part` of `weight`: lora_A [r, in], which comes in as a fresh one, and lora_B [out,
  // r]. A rank that the loss has no more for stays fresh: its row of A as it was, its column of B 0. At work
  // this holds the part's matrix once in fp32, and its codes.
  void start(const TensorPlace& weight, size_t part, uint64_t seed, std::span<float> a,
             std::span<float> b) const;

 private:
  const TensorPlace& find(ParameterKind kind, const std::string& name) const;
  const TensorPlace* find_if(ParameterKind kind, const std::string& name) const;  // null: there is none
  // How large the inputs of the matrix's columns are, as root mean squares.
  std::vector<float> input_sizes(const TensorPlace& weight) const;
  // Of the mixer's matrix that does not read the norm's output.
  std::vector<float> inner_sizes(const AttentionSpec& attention) const;
  std::vector<float> inner_sizes(const GatedMlpSpec& mlp) const;
  // Without their sign; 1 where the sublayer has no such norm.
  std::vector<float> gains(const char* norm) const;
  // Of rows [first, first + rows) of a matrix whose inputs' columns are of these sizes.
  std::vector<float> row_sizes(const char* matrix, int64_t first, int64_t rows,
                               const std::vector<float>& inputs) const;
  // The matrix less what its codes stand for, each column times its size.
  std::vector<float> lost(const TensorPlace& place, size_t part, const std::vector<float>& sizes) const;

  const LoftqSetup& setup_;
  const LayerSpec& layer_;
  const BlockLayout& block_;
};

}  // namespace lm
