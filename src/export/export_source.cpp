#include "export/export_source.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "weights/adapter_files.h"
#include "weights/convert.h"
#include "weights/initialise.h"
#include "weights/read_part.h"
#include "weights/stored.h"

namespace lm {
namespace {

constexpr int64_t kPieceBytes = 16 * kMiB;  // of rows that are only copied; plan/sizes.cpp counts it
constexpr int64_t kFloat = sizeof(float);

const ParameterPart& part_of(const Parameter& parameter, int64_t row) {
  const auto part = std::ranges::find_if(parameter.parts, [row](const ParameterPart& one) {
    return one.first <= row && row < one.first + one.rows;
  });
  LM_CHECK(part != parameter.parts.end(), parameter.name);
  return *part;
}

bool has_adapter(const ModelLayout& layout) {
  return std::ranges::any_of(layout.blocks, [](const BlockLayout& block) {
    return std::ranges::any_of(block.trainables,
                               [](const Trainable& entry) { return in_adapter(entry.role); });
  });
}

}  // namespace

WeightView StoreSource::view(size_t block, const TensorPlace& place, int64_t row) {
  const auto b = static_cast<int64_t>(block);
  const DType dtype = place.parameter.fp32 ? DType::kF32 : dtype_;
  const int64_t all_bytes = place.parameter.elements() * static_cast<int64_t>(dtype_size(dtype));
  LM_CHECK(!place.frozen || (!place.encoded() && place.pieces.front().bytes == all_bytes),
           place.parameter.name);
  const Unit& unit = open(b, place, row);
  if (exports_masters(place.parameter.role) && masters_) {
    floats_.resize(static_cast<size_t>(place.parameter.elements()));
    masters_(b, place, open_->trainable(), floats_.data(), staging_);
    if (dtype_ == DType::kBF16) settle_ties(floats_);  // loading it in bf16 gives the trained weights
    return {reinterpret_cast<const std::byte*>(floats_.data()), DType::kF32};
  }
  const std::byte* const source = open_->tensor(place);
  WeightView view{source, dtype, unit.first_row, unit.rows};
  if (!staging_.used()) return view;
  const int64_t row_bytes = place.parameter.columns * static_cast<int64_t>(dtype_size(dtype));
  const int64_t end = view.first_row + (unit.segment() ? unit.rows : place.parameter.rows);
  view.first_row = row;
  view.rows = std::min(end - row, std::max<int64_t>(staging_.piece_bytes() / row_bytes, 1));
  bytes_.resize(static_cast<size_t>(view.rows * row_bytes));
  staging_.read_into(bytes_.data(), source + (row - unit.first_row) * row_bytes, std::ssize(bytes_));
  view.memory = bytes_.data();
  return view;
}

const Unit& StoreSource::open(int64_t block, const TensorPlace& place, int64_t row) {
  const std::vector<int64_t> units = store_.units_of(block, place);
  const int64_t wanted = units[units.size() == 1 ? 0 : static_cast<size_t>(row / kVocabularySegment)];
  if (!open_ || open_->unit() != wanted) {
    open_.reset();  // before the next: offloaded units share one slot
    open_.emplace(store_.open(wanted, false));
  }
  return store_.units()[static_cast<size_t>(wanted)];
}

FileSource::FileSource(const ExportFiles& setup) : setup_(setup) {
  if (!setup.model.empty()) {
    files_ = std::make_unique<ModelFiles>(setup.model);
    check_model_files(*files_, setup.spec);
  }
  if (!setup.adapter.empty() || (setup.trained && has_adapter(setup.layout))) read_adapter();
}

void FileSource::read_adapter() {
  for (const BlockLayout& block : setup_.layout.blocks)
    adapter_.emplace_back(static_cast<size_t>(block.flat_elements * kFloat));
  for (size_t b = 0; setup_.trained && b < adapter_.size(); ++b) {
    const int64_t elements = std::ssize(adapter_[b]) / kFloat;
    if (elements > 0) setup_.trained(b, 0, elements, reinterpret_cast<float*>(adapter_[b].data()));
  }
  if (setup_.trained) return;
  const auto target = [&](size_t block, const TensorPlace& place) {
    return LoadTarget{adapter_[block].data() + place.offset * kFloat, DType::kF32};
  };
  load_adapter(setup_.adapter, setup_.layout, target,
               {.threads = setup_.threads, .base = &setup_.spec, .base_directory = setup_.model});
}

WeightView FileSource::view(size_t block, const TensorPlace& place, int64_t row) {
  if (in_adapter(place.parameter.role))
    return {adapter_.at(block).data() + place.offset * kFloat, DType::kF32};
  const Parameter& parameter = place.parameter;
  if (setup_.merge && place.frozen && !adapter_.at(block).empty()) {
    if (merged_ != &place) {
      read_rows(place, 0, parameter.rows);
      if (place.encoded()) round_to_codes(place);
      setup_.merge(block, place, adapter_[block].data(), floats_.data());
      merged_ = &place;
    }
    return {floats_.data(), DType::kF32};
  }
  merged_ = nullptr;
  const ParameterPart& part = part_of(parameter, row);
  const int64_t most = std::max<int64_t>(kPieceBytes / (parameter.columns * kFloat), 1);
  const int64_t rows = std::min(part.first + part.rows - row, most);
  if (setup_.trained && !place.frozen) {
    floats_.resize(static_cast<size_t>(rows * parameter.columns * kFloat));
    setup_.trained(block, place.offset + row * parameter.columns, rows * parameter.columns,
                   reinterpret_cast<float*>(floats_.data()));
  } else {
    read_rows(place, row, rows);
  }
  return {floats_.data(), DType::kF32, row, rows};
}

void FileSource::read_rows(const TensorPlace& place, int64_t first, int64_t rows) {
  const Parameter& parameter = place.parameter;
  floats_.resize(static_cast<size_t>(rows * parameter.columns * kFloat));
  if (files_ == nullptr)
    return initialise({parameter, static_cast<uint64_t>(setup_.seed), place.number, DType::kF32},
                      floats_.data(), first, rows, setup_.threads);
  for (int64_t row = first; row < first + rows;) {
    const ParameterPart& part = part_of(parameter, row);
    const int64_t end = std::min(part.first + part.rows, first + rows);
    const auto stored = find_stored(*files_, part, parameter.columns);
    // Some rows of MXFP4 are read by themselves.
    if (stored && stored->kind != EncodingKind::kMxfp4) {
      std::vector<float> values(static_cast<size_t>(part.rows * parameter.columns));
      decode_stored(*stored, part.rows, parameter.columns, values.data(), setup_.threads);
      std::memcpy(floats_.data() + (row - first) * parameter.columns * kFloat,
                  values.data() + (row - part.first) * parameter.columns,
                  static_cast<size_t>((end - row) * parameter.columns * kFloat));
      row = end;
      continue;
    }
    read_part(file_part(*files_, parameter, part), (row - part.first) * parameter.columns,
              (end - row) * parameter.columns, DType::kF32,
              floats_.data() + (row - first) * parameter.columns * kFloat);
    row = end;
  }
}

void FileSource::round_to_codes(const TensorPlace& place) {
  const Parameter& parameter = place.parameter;
  std::vector<std::byte> pieces(static_cast<size_t>(place.pieces.back().offset + place.pieces.back().bytes -
                                                    place.pieces.front().offset));
  for (size_t p = 0; p < parameter.parts.size(); ++p) {
    const ParameterPart& part = parameter.parts[p];
    // Values of stored codes are already dequantized.
    if (files_ != nullptr && find_stored(*files_, part, parameter.columns)) continue;
    std::byte* const values = floats_.data() + part.first * parameter.columns * kFloat;
    write_encoded(place, p, pieces.data(), nullptr, [&](const EncodedMatrix& matrix) {
      const auto elements = [&](int64_t first, int64_t n, std::byte* to) {
        convert_elements(values + first * kFloat, DType::kF32, to, setup_.quantized_from, n);
      };
      encode(matrix, setup_.quantized_from, elements, setup_.threads);
      decode(matrix, reinterpret_cast<float*>(values), setup_.threads);
    });
  }
}

}  // namespace lm
