#include "checkpoint/trained_values.h"

#include <fmt/format.h>

#include "optim/open_tile.h"
#include "weights/adapter_files.h"
#include "weights/convert.h"

namespace lm {

void TrainedValues::read(int64_t block, int64_t first, int64_t elements, float* out) const {
  const std::string name = fmt::format("block{}.", block), weight = name + "weight", master = name + "master";
  const SavedArray *const weights = reader_.find(weight), *const masters =
                                                              masters_ ? reader_.find(master) : nullptr;
  const auto read = [&](const std::string& array, void* to, int64_t size) {
    reader_.read(array, first * size, {static_cast<std::byte*>(to), static_cast<size_t>(elements * size)});
  };
  if (weights == nullptr || weights->dtype == DType::kF32) return read(weight, out, 4);
  if (masters != nullptr && masters->dtype == DType::kF32) {
    read(master, out, 4);
  } else {
    std::vector<uint16_t> high(static_cast<size_t>(elements)), low(high.size(), 0);
    read(weight, high.data(), 2);
    if (masters != nullptr) read(master, low.data(), 2);
    join_masters(high, low, out);
  }
  if (masters != nullptr) settle_ties({out, static_cast<size_t>(elements)});
}

}  // namespace lm
