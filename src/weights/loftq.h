// Initial adapters of a quantized model (Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization", one step of
// it): the best rank-r approximation of the quantization error W - Q(W). The approximation minimises the
// change of the layer's output: columns are weighted by the size of the layer's inputs. No data is needed;
// the sizes follow from the norms' gains and from the matrices that produce the inputs.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "spec/block_layout.h"
#include "weights/encode.h"

namespace lm {

// Unquantized elements of part `part` of `place`, from the files.
using PartElements = std::function<MatrixElements(const TensorPlace& place, size_t part)>;

struct LoftqSetup {
  const ModelSpec& spec;
  double scale = 1;  // of the output of the adapter that is started
  DType dtype = DType::kBF16;
  int threads = 1;
  PartElements elements;  // of `dtype`, from which codes are computed
};

// A transformer block with quantized matrices. One thread calls; `setup`, `layer` and `block` are the
// caller's and outlive it.
class LoftqBlock {
 public:
  LoftqBlock(const LoftqSetup& setup, const LayerSpec& layer, const BlockLayout& block)
      : setup_(setup), layer_(layer), block_(block) {}

  // The adapter of part `part` of `weight`: lora_A [r, in], initialised as a fresh one by the caller, and
  // lora_B [out, r]. A rank beyond that of the error stays fresh: its row of A unchanged, its column of B 0.
  // While running this holds the part's matrix once in fp32, and its codes.
  void start(const TensorPlace& weight, size_t part, uint64_t seed, std::span<float> a,
             std::span<float> b) const;

 private:
  const TensorPlace& find(ParameterKind kind, const std::string& name) const;
  const TensorPlace* find_if(ParameterKind kind, const std::string& name) const;  // null: there is none
  // The sizes of the inputs of the matrix's columns, as root mean squares.
  std::vector<float> input_sizes(const TensorPlace& weight) const;
  // Of the products of the first `ffn` rows and the others.
  std::vector<float> gated_sizes(const char* matrix, int64_t ffn, const std::vector<float>& inputs) const;
  // For the sublayer's matrix that does not read the norm's output, `inputs` being those of its others.
  std::vector<float> inner_sizes(const AttentionSpec& attention, const std::vector<float>& inputs) const;
  std::vector<float> inner_sizes(const GatedMlpSpec& mlp, const std::vector<float>& inputs) const;
  std::vector<float> inner_sizes(const PlainMlpSpec& mlp, const std::vector<float>& inputs) const;
  std::vector<float> inner_sizes(const SharedExpertSpec& mlp, const std::vector<float>& inputs) const;
  std::vector<float> inner_sizes(const LayerInputSpec& mixer, const std::vector<float>& inputs) const;
  std::vector<float> inner_sizes(const ExpertsSpec& mixer, const std::vector<float>& inputs) const;
  // The absolute values of a norm's factors; 1 where there is no such norm.
  std::vector<float> gains(const char* norm) const;
  // Sizes of the outputs of rows [first, first + rows) of a matrix with inputs of these sizes.
  std::vector<float> row_sizes(const char* matrix, int64_t first, int64_t rows,
                               const std::vector<float>& inputs) const;
  // The quantization error of the matrix, each column times its size.
  std::vector<float> lost(const TensorPlace& place, size_t part, const std::vector<float>& sizes) const;

  const LoftqSetup& setup_;
  const LayerSpec& layer_;
  const BlockLayout& block_;
};

}  // namespace lm
