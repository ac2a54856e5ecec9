// The two sources of an export, read a bounded number of rows at a time: the weights of a rank, and files. A
// view stays valid until the next call. One thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "base/staging.h"
#include "export/weight_source.h"
#include "weights/loans.h"

namespace lm {

// Reads a trainable tensor's fp32 masters into `out`; `weights`: the unit's trainable part.
using MasterReader = std::function<void(int64_t block, const TensorPlace& place, const std::byte* weights,
                                        float* out, Staging& staging)>;

// Whether a trained tensor is exported from its fp32 masters, if there is a reader of them: adapters are
// small, and masters more precise than working weights. What is trained whole is exported as full fine-tuning
// does.
constexpr bool exports_masters(TrainableRole role) {
  return adapts(role);
}

// A rank's weights as host memory: those that are trained, and frozen ones of the same type. A base in
// codes, or in another type, is refused: FileSource reads it.
class StoreSource {
 public:
  StoreSource(WeightStore& store, DType dtype, StreamView stream, MasterReader masters = {})
      : store_(store), dtype_(dtype), staging_(stream), masters_(std::move(masters)) {}
  WeightView view(size_t block, const TensorPlace& place, int64_t row);

 private:
  // Opens the unit of that row of the tensor.
  const Unit& open(int64_t block, const TensorPlace& place, int64_t row);

  WeightStore& store_;
  DType dtype_;
  Staging staging_;
  MasterReader masters_;
  std::optional<OpenUnit> open_;
  std::vector<float> floats_;
  std::vector<std::byte> bytes_;
};

// Merges the adapter of the frozen tensor `place` into `weight`. `adapter`: the block's trainable tensors;
// all in fp32.
using Merge =
    std::function<void(size_t block, const TensorPlace& place, const std::byte* adapter, std::byte* weight)>;

struct ExportFiles {
  const ModelSpec& spec;
  const ModelLayout& layout;  // of fp32
  // Directory of the model's own tensors, of which `trained` lacks only frozen ones; "": initialised with
  // `seed`.
  std::string model;
  int64_t seed = 0;
  std::string adapter;  // PEFT directory; "": none
  // Replaces the trained tensors of these files: reads fp32 elements of a block's flat array.
  std::function<void(size_t block, int64_t first, int64_t elements, float* out)> trained = {};
  int threads = 1;
  Merge merge = {};  // empty: nothing is merged
  // For quantized layouts: merges into the dequantized values of codes computed from elements of this type,
  // which are the weights that the adapter was trained on.
  DType quantized_from = DType::kBF16;
};

// Files as fp32, tensor by tensor: the adapter is in memory, of the model only the tensor being merged, or
// some rows. Construction checks names and shapes and throws Error(11).
class FileSource {
 public:
  explicit FileSource(const ExportFiles& setup);
  WeightView view(size_t block, const TensorPlace& place, int64_t row);

 private:
  void read_adapter();
  void read_rows(const TensorPlace& place, int64_t first, int64_t rows);
  // Replaces the whole tensor in `floats_` by the dequantized values of its codes.
  void round_to_codes(const TensorPlace& place);

  ExportFiles setup_;
  std::unique_ptr<ModelFiles> files_;            // null: initialised
  std::vector<std::vector<std::byte>> adapter_;  // of each block, as its flat array
  std::vector<std::byte> floats_;
  const TensorPlace* merged_ = nullptr;  // the tensor in floats_
};

}  // namespace lm
