#include "checkpoint/state_difference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "checkpoint/trained_values.h"
#include "weights/convert.h"

namespace lm {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;  // elements

struct WholeArray {
  DType dtype = DType::kF32;
  int64_t elements = 0;  // of all ranks' shards
};
using Arrays = std::map<std::string, WholeArray>;

Arrays arrays_of(const Manifest& manifest) {
  Arrays out;
  for (const SavedArray& part : manifest.arrays) {
    WholeArray& whole = out[part.name];
    whole.dtype = part.dtype;
    whole.elements = std::max(whole.elements, part.first + part.elements);
  }
  return out;
}

// Elements of an array from `first` on.
struct Slice {
  CheckpointReader& reader;
  std::string array;
  DType dtype = DType::kF32;
  int64_t first = 0;

  void read(int64_t from, int64_t elements, std::vector<std::byte>& out) const {
    const auto size = static_cast<int64_t>(dtype_size(dtype));
    out.resize(static_cast<size_t>(elements * size));
    reader.read(array, (first + from) * size, out);
  }
};

std::vector<float> floats(const std::vector<std::byte>& bytes, DType dtype, int64_t elements) {
  std::vector<float> out(static_cast<size_t>(elements));
  convert_elements(bytes.data(), dtype, reinterpret_cast<std::byte*>(out.data()), DType::kF32, elements);
  return out;
}

void add_largest(std::optional<double>& to, double difference) {
  if (std::isnan(difference)) difference = std::numeric_limits<double>::infinity();
  to = std::max(to.value_or(0), difference);
}

// Values of both, which are floating, or of one type.
void compare_chunk(const Slice& a, const Slice& b, const std::vector<std::byte>& x,
                   const std::vector<std::byte>& y, int64_t elements, TensorDifference& out) {
  if (!is_weight_type(a.dtype)) {
    const size_t size = dtype_size(a.dtype);
    for (size_t at = 0; at < x.size(); at += size)
      out.differ += std::memcmp(x.data() + at, y.data() + at, size) != 0;
    return;
  }
  const std::vector<float> left = floats(x, a.dtype, elements), right = floats(y, b.dtype, elements);
  for (size_t i = 0; i < left.size(); ++i) {
    if (std::memcmp(&left[i], &right[i], sizeof left[i]) == 0) continue;
    ++out.differ;
    add_largest(out.largest, std::abs(static_cast<double>(left[i]) - static_cast<double>(right[i])));
  }
}

TensorDifference compare(std::string name, const Slice& a, const Slice& b, int64_t elements) {
  TensorDifference out{.name = std::move(name), .elements = elements, .differ = 0, .largest = {}};
  if (a.dtype != b.dtype && (!is_weight_type(a.dtype) || !is_weight_type(b.dtype))) {
    out.differ = elements;
    return out;
  }
  std::vector<std::byte> x, y;
  for (int64_t from = 0; from < elements; from += kChunk) {
    const int64_t n = std::min(kChunk, elements - from);
    a.read(from, n, x);
    b.read(from, n, y);
    if (a.dtype != b.dtype || x != y) compare_chunk(a, b, x, y, n, out);
  }
  return out;
}

void add(StateDifference& to, TensorDifference one) {
  ++to.compared;
  if (one.differ == 0) return;
  ++to.differ;
  if (one.largest) add_largest(to.largest, *one.largest);
  if (!to.first) to.first = std::move(one);
}

using Tensors = std::map<std::string, const SavedTensor*>;

Tensors tensors_of(const Manifest& manifest) {
  Tensors out;
  for (const SavedTensor& tensor : manifest.tensors) out[tensor.name] = &tensor;
  return out;
}

std::string block_name(const SavedTensor& tensor) {
  return fmt::format("block{}.", tensor.block);
}

// The optimizer's state tensors of both checkpoints.
class Streams {
 public:
  Streams(CheckpointReader& a, CheckpointReader& b)
      : a_(a), b_(b), of_a_(arrays_of(a.manifest())), of_b_(arrays_of(b.manifest())) {}

  // Compares those with a value for each element of `left` and `right`, tensors of one name and shape, in the
  // order of the state tensors' names.
  void compare_tensor(const SavedTensor& left, const SavedTensor& right, int64_t elements,
                      StateDifference& out) {
    const std::string block = block_name(left), other = block_name(right);
    for (auto one = of_a_.lower_bound(block); one != of_a_.end() && one->first.starts_with(block); ++one) {
      const std::string stream = one->first.substr(block.size());
      const auto two = of_b_.find(other + stream);
      if (stream == "weight" || two == of_b_.end() || !of_elements(of_a_, block, *one) ||
          !of_elements(of_b_, other, *two))
        continue;
      done_.insert(one->first);
      add(out, compare(left.name + " " + stream, {a_, one->first, one->second.dtype, left.first},
                       {b_, two->first, two->second.dtype, right.first}, elements));
    }
  }

  // Everything that compare_tensor has not met.
  void compare_others(StateDifference& out) {
    for (const auto& [name, whole] : of_a_) {
      if (done_.contains(name) || name.ends_with(".weight")) continue;
      const auto other = of_b_.find(name);
      if (other == of_b_.end()) {
        ++out.only_a;
        continue;
      }
      std::string title = name;
      std::ranges::replace(title, '.', ' ');
      const bool alike = whole.elements == other->second.elements;
      add(out, alike ? compare(title, {a_, name, whole.dtype, 0}, {b_, name, other->second.dtype, 0},
                               whole.elements)
                     : TensorDifference{title, whole.elements, whole.elements, {}});
    }
    for (const auto& [name, whole] : of_b_) out.only_b += !name.ends_with(".weight") && !of_a_.contains(name);
  }

 private:
  static bool of_elements(const Arrays& arrays, const std::string& block, const Arrays::value_type& array) {
    const auto weight = arrays.find(block + "weight");
    return weight != arrays.end() && weight->second.elements == array.second.elements;
  }

  CheckpointReader &a_, &b_;
  Arrays of_a_, of_b_;
  std::set<std::string> done_;
};

}  // namespace

StateDifference compare_weights(CheckpointReader& a, CheckpointReader& b) {
  StateDifference out;
  const Arrays of_a = arrays_of(a.manifest()), of_b = arrays_of(b.manifest());
  const auto slice = [](CheckpointReader& reader, const Arrays& arrays, const SavedTensor& tensor) {
    const std::string name = block_name(tensor) + "weight";
    const auto found = arrays.find(name);  // an absent one is an error when it is read
    return Slice{reader, name, found == arrays.end() ? DType::kF32 : found->second.dtype, tensor.first};
  };
  const Tensors left = tensors_of(a.manifest()), right = tensors_of(b.manifest());
  for (const SavedTensor& tensor : a.manifest().tensors) {
    const auto other = right.find(tensor.name);
    const int64_t elements = elements_of(tensor, a.directory());
    if (other == right.end()) {
      ++out.only_a;
    } else if (other->second->shape != tensor.shape) {
      add(out, {tensor.name, elements, elements, {}});
    } else {
      add(out, compare(tensor.name, slice(a, of_a, tensor), slice(b, of_b, *other->second), elements));
    }
  }
  for (const auto& [name, tensor] : right) out.only_b += !left.contains(name);
  return out;
}

StateDifference compare_optimizer(CheckpointReader& a, CheckpointReader& b) {
  StateDifference out;
  Streams streams(a, b);
  const Tensors right = tensors_of(b.manifest());
  for (const SavedTensor& tensor : a.manifest().tensors) {
    const auto other = right.find(tensor.name);
    if (other != right.end() && other->second->shape == tensor.shape)
      streams.compare_tensor(tensor, *other->second, elements_of(tensor, a.directory()), out);
  }
  streams.compare_others(out);
  const auto& numbers = b.manifest().numbers;
  for (const auto& [name, value] : a.manifest().numbers) {
    const auto other = numbers.find(name);
    if (other == numbers.end()) {
      ++out.only_a;
      continue;
    }
    TensorDifference one{.name = name, .elements = 1, .differ = value != other->second, .largest = {}};
    if (one.differ != 0)
      one.largest = std::abs(static_cast<double>(value) - static_cast<double>(other->second));
    add(out, one);
  }
  for (const auto& [name, value] : numbers) out.only_b += !a.manifest().numbers.contains(name);
  return out;
}

}  // namespace lm
