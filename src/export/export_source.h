// The two places that an export reads from, a bounded number of rows at a time: the weights of a rank, and
// files. What a view shows stays valid until the next question. One thread.
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

// fp32 value of a trainable tensor's master into `out`; `weights`: the unit's trainable part.
using MasterReader = std::function<void(int64_t block, const TensorPlace& place, const std::byte* weights,
                                        float* out, Staging& staging)>;

// A rank's weights as host memory. An adapter is shown as its fp32 masters where there is a reader of them,
// which know more than the working weights.
class StoreSource {
 public:
  StoreSource(WeightStore& store, DType dtype, StreamView stream, MasterReader masters = {})
      : store_(store), dtype_(dtype), staging_(stream), masters_(std::move(masters)) {}
  WeightView view(size_t block, const TensorPlace& place, int64_t row);

 private:
  // The unit in which that row of the tensor lies.
  const Unit& open(int64_t block, const TensorPlace& place, int64_t row);

  WeightStore& store_;
  DType dtype_;
  Staging staging_;
  MasterReader masters_;
  std::optional<OpenUnit> open_;
  std::vector<float> floats_;
  std::vector<std::byte> bytes_;
};

// Adds what `adapter`, the block's trainable tensors in fp32, holds for the frozen tensor `place` to
// `weight`, all of it in fp32.
using Merge =
    std::function<void(size_t block, const TensorPlace& place, const std::byte* adapter, std::byte* weight)>;

struct ExportFiles {
  const ModelSpec& spec;
  const ModelLayout& layout;  // of fp32
  std::string model;          // directory of the model's own tensors; "": fresh ones, drawn with `seed`
  int64_t seed = 0;
  std::string adapter;  // PEFT directory; "": none
  // Instead of what is trained in these files: fp32 values of elements of a block's flat array.
  std::function<void(size_t block, int64_t first, int64_t elements, float* out)> trained = {};
  int threads = 1;
  Merge merge = {};  // empty: nothing is merged
  // Where the layout's matrices are encoded, what is merged into is what their codes, made from elements of
  // this type, stand for: the weights that the adapter was trained on.
  DType quantised_from = DType::kBF16;
};

// Files as fp32, tensor by tensor: the adapter is held, of the model no more than a tensor that is merged, or
// some rows. Construction checks names and shapes and throws Error(11).
class FileSource {
 public:
  explicit FileSource(const ExportFiles& setup);
  WeightView view(size_t block, const TensorPlace& place, int64_t row);

 private:
  void read_adapter();
  void read_rows(const TensorPlace& place, int64_t first, int64_t rows);
  // All of a tensor that `floats_` holds becomes what its codes stand for.
  void round_to_codes(const TensorPlace& place);

  ExportFiles setup_;
  std::unique_ptr<ModelFiles> files_;            // null: fresh
  std::vector<std::vector<std::byte>> adapter_;  // of each block, as its flat array
  std::vector<std::byte> raw_, floats_;
  const TensorPlace* merged_ = nullptr;  // that floats_ holds
};

}  // namespace lm
