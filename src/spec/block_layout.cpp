#include "spec/block_layout.h"

#include <fmt/format.h>
#include <algorithm>
#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kFrozenStart = 512;  // bytes: the alignment of direct I/O and of the widest vector loads

void place_trainable(std::vector<Parameter>&& parameters, BlockLayout& layout) {
  for (Parameter& parameter : parameters) {
    const size_t tensor = layout.tensors.size();
    const Trainable& entry = layout.trainables.emplace_back(
        Trainable{.tensor = tensor, .role = parameter.role, .owner = tensor, .decay = !parameter.vector()});
    if (layout.ranges.empty() || layout.ranges.back().decay != entry.decay) {
      layout.flat_elements = round_up(layout.flat_elements, kGranule);
      layout.ranges.push_back({layout.flat_elements, 0, entry.decay});
    }
    DecayRange& range = layout.ranges.back();
    const int64_t offset = round_up(layout.flat_elements, kTensorStart);
    layout.flat_elements = offset + parameter.elements();
    range.elements = round_up(layout.flat_elements, kGranule) - range.first;
    layout.parameter_elements += parameter.elements();
    layout.tensors.push_back({.parameter = std::move(parameter), .offset = offset, .frozen = false});
  }
  layout.flat_elements = round_up(layout.flat_elements, kGranule);
}

void find_small_runs(BlockLayout& layout) {
  for (size_t i = 0; i < layout.tensors.size() && !layout.tensors[i].frozen; ++i) {
    const TensorPlace& place = layout.tensors[i];
    if (place.parameter.elements() >= kSmallTensor) continue;
    const bool last = i + 1 == layout.tensors.size() || layout.tensors[i + 1].frozen;
    const int64_t end = last ? layout.flat_elements : layout.tensors[i + 1].offset;
    if (!layout.small_runs.empty() && layout.small_runs.back().end == place.offset) {
      layout.small_runs.back().end = end;
    } else {
      layout.small_runs.push_back({place.offset, end});
    }
  }
}

void find_sides(BlockLayout& layout) {
  for (const TensorPlace& place : layout.tensors) {
    if (place.frozen || place.parameter.vector()) continue;
    MatrixSides sides{.offset = place.offset};
    place.each_part([&](int64_t, int64_t rows, int64_t columns) {
      sides.rows += round_up(rows, kStatisticsStart);
      sides.columns += round_up(columns, kStatisticsStart);
    });
    layout.sides.push_back(sides);
  }
}

// Owners are looked up by name here, once all tensors are placed.
void find_owners(std::vector<Trainable>& entries, const BlockLayout& layout) {
  for (Trainable& entry : entries) {
    const std::string& owner = layout.tensors[entry.tensor].parameter.owner;
    for (size_t t = 0; !owner.empty() && t < layout.tensors.size(); ++t) {
      const std::vector<ParameterPart>& parts = layout.tensors[t].parameter.parts;
      const auto part = std::ranges::find(parts, owner, &ParameterPart::name);
      if (part == parts.end()) continue;
      entry.owner = t;
      entry.part = static_cast<size_t>(part - parts.begin());
    }
    LM_CHECK(owner.empty() || entry.owner != entry.tensor, owner);
  }
}

// They come before the block's buffers: a head's matrix is the first of the frozen tensors, too.
void freeze_others(const TrainedFilter& trained, BlockParameters& block) {
  const auto others = std::stable_partition(block.trainable.begin(), block.trainable.end(), trained);
  block.frozen.insert(block.frozen.begin(), std::make_move_iterator(others),
                      std::make_move_iterator(block.trainable.end()));
  block.trainable.erase(others, block.trainable.end());
}

int64_t placed_bytes(const FrozenPiece& piece) {
  return round_up(piece.bytes, kFrozenStart);
}

void place_frozen(std::vector<Parameter>&& parameters, const Encoding& plain, const Encoding& of_matrices,
                  BlockLayout& layout) {
  for (Parameter& parameter : parameters) {
    const bool start = is_start(parameter.role);
    const bool encodes = parameter.kind == ParameterKind::kMatrix && !parameter.plain && !start;
    const bool takes = of_matrices.kind != EncodingKind::kMxfp4 || parameter.of_expert;
    const Encoding& encoding = encodes && takes ? of_matrices : plain;
    if (start) layout.starts.push_back({.tensor = layout.tensors.size(), .role = parameter.role});
    TensorPlace place{.parameter = std::move(parameter), .offset = layout.frozen_bytes, .frozen = true};
    const auto add = [&](int64_t rows) {
      for (const int64_t bytes : encoding.piece_bytes(rows, place.parameter.columns)) {
        place.pieces.push_back({&encoding, layout.frozen_bytes, bytes});
        layout.frozen_bytes += placed_bytes(place.pieces.back());
      }
    };
    if (encoding.plain()) add(place.parameter.rows);
    for (const ParameterPart& part : place.parameter.parts) {
      if (!encoding.plain()) add(part.rows);
    }
    if (!start) layout.frozen_elements += place.parameter.elements();
    layout.tensors.push_back(std::move(place));
  }
}

// Gives the head's matrix, which `units` has with the final norm, to its segments.
void chunk_head_matrix(const TensorPlace& head, const BlockLayout& block, std::vector<Unit>& units) {
  LM_CHECK(head.offset == 0, "the head's matrix comes first in its block");
  const int64_t rows = head.parameter.rows;
  const int64_t row_size = head.frozen ? head.pieces.front().bytes / rows : head.parameter.columns;
  const int64_t each = kVocabularySegment * row_size;
  int64_t end = head.frozen ? block.frozen_bytes : block.flat_elements;  // of the matrix
  for (const TensorPlace& place : block.tensors) {
    if (place.frozen == head.frozen && place.offset > 0) end = std::min(end, place.offset);
  }
  int64_t row = 0, at = 0;
  for (Unit& unit : units) {
    int64_t& first = head.frozen ? unit.first_frozen_byte : unit.first;
    int64_t& size = head.frozen ? unit.frozen_bytes : unit.elements;
    if (unit.role == UnitRole::kFinalNorm) first = end, size -= end;
    if (!unit.segment()) continue;
    unit.first_row = row;
    unit.rows = std::min(kVocabularySegment, rows - row);
    first = at;
    size = std::min(each, end - at);
    row += kVocabularySegment, at += each;
  }
}

}  // namespace

bool Unit::holds(const TensorPlace& place) const {
  return place.frozen
             ? place.offset >= first_frozen_byte && place.offset < first_frozen_byte + frozen_bytes
             : place.offset >= first && place.offset + place.parameter.elements() <= first + elements;
}

Shard shard_of(const Unit& unit, int rank, int ranks) {
  const int64_t granules = unit.elements / kGranule, each = ceil_div(granules, ranks);
  const int64_t begin = std::min(rank * each, granules), end = std::min(begin + each, granules);
  return {.first = unit.first + begin * kGranule, .elements = (end - begin) * kGranule};
}

Shard shard_of(const Unit& unit, const Sharding& sharding, int place) {
  const int copies = sharding.copies(), first = place * copies;
  const int64_t begin = shard_of(unit, first, sharding.ranks).first;
  return {.first = begin, .elements = shard_of(unit, first + copies - 1, sharding.ranks).end() - begin};
}

Shard frozen_shard_of(int64_t bytes, int rank, int ranks) {
  constexpr int64_t kSector = 512;
  const int64_t each = round_up(ceil_div(bytes, ranks), kSector), first = std::min(rank * each, bytes);
  return {.first = first, .elements = std::min(each, bytes - first)};
}

std::vector<Unit> list_units(int64_t layers, int64_t segments) {
  std::vector<Unit> out = {{.block = 0, .role = UnitRole::kEmbedding}};
  for (int64_t i = 1; i <= layers; ++i) out.push_back({.block = i, .role = UnitRole::kBody});
  out.push_back({.block = layers + 1, .role = segments > 0 ? UnitRole::kFinalNorm : UnitRole::kHead});
  for (int64_t i = 0; i < segments; ++i)
    out.push_back({.block = layers + 1, .role = UnitRole::kVocabularySegment});
  return out;
}

std::vector<Unit> ModelLayout::units(bool chunked_head) const {
  const TensorPlace* const head = chunked_head ? blocks.back().find("head") : nullptr;
  std::vector<Unit> out = list_units(
      std::ssize(blocks) - 2, head == nullptr ? 0 : ceil_div(head->parameter.rows, kVocabularySegment));
  for (Unit& unit : out) {
    if (unit.segment()) continue;
    const BlockLayout& block = blocks[static_cast<size_t>(unit.block)];
    unit.elements = block.flat_elements;
    unit.frozen_bytes = block.frozen_bytes;
  }
  if (head != nullptr) chunk_head_matrix(*head, blocks.back(), out);
  return out;
}

int64_t ModelLayout::first_trained() const {
  const auto first =
      std::ranges::find_if(blocks, [](const BlockLayout& block) { return block.flat_elements > 0; });
  return first == blocks.end() ? 0 : first - blocks.begin();
}

bool moves_frozen(const BlockLayout& block, const Unit& unit, DType trained) {
  if (unit.frozen_bytes == 0) return false;
  const bool beside =
      std::ranges::any_of(block.trainables, [](const Trainable& entry) { return adapts(entry.role); });
  return beside || unit.frozen_bytes > unit.elements * static_cast<int64_t>(dtype_size(trained));
}

std::string ModelLayout::name(const Unit& unit) const {
  const std::string& block = blocks[static_cast<size_t>(unit.block)].name;
  return unit.segment() ? fmt::format("{}, segment {}", block, unit.first_row / kVocabularySegment) : block;
}

const TensorPlace* BlockLayout::find(const std::string& tensor) const {
  for (const TensorPlace& place : tensors) {
    if (place.parameter.name == tensor) return &place;
  }
  return nullptr;
}

bool BlockLayout::trains(const std::string& name) const {
  const TensorPlace* const place = find(name);
  return place != nullptr && !place->frozen;
}

const TensorPlace* BlockLayout::beside(const TensorPlace& owner, size_t part, TrainableRole role) const {
  for (const Trainable& entry : is_start(role) ? starts : trainables) {
    if (entry.role == role && &tensors[entry.owner] == &owner && entry.part == part)
      return &tensors[entry.tensor];
  }
  return nullptr;
}

Elements BlockLayout::count(int64_t from, int64_t to) const {
  Elements out{.all = to - from};
  for (const ElementRun& run : small_runs)
    out.small += std::max<int64_t>(std::min(run.end, to) - std::max(run.first, from), 0);
  for (const DecayRange& range : ranges) {
    const int64_t end = range.first + range.elements;
    if (!range.decay) out.vectors += std::max<int64_t>(std::min(end, to) - std::max(range.first, from), 0);
  }
  out.outside = linear ? out.vectors : out.all;
  for (const MatrixSides& matrix : sides) {
    if (matrix.offset < from || matrix.offset >= to) continue;
    out.rows += matrix.rows;
    out.columns += matrix.columns;
  }
  return out;
}

std::map<std::string, int64_t> ModelLayout::frozen_bytes_by_encoding() const {
  std::map<std::string, int64_t> out;
  for (const BlockLayout& block : blocks) {
    for (const TensorPlace& place : block.tensors) {
      for (const FrozenPiece& piece : place.pieces) out[piece.encoding->name] += placed_bytes(piece);
    }
  }
  return out;
}

ModelLayout make_layout(const ModelSpec& spec, const AdapterSpec* adapter, DType dtype,
                        const Encoding* encoding, const TrainedFilter& trained) {
  const Encoding& plain = plain_encoding(dtype);
  ModelLayout model;
  uint32_t number = 0;
  for (BlockParameters& block : list_parameters(spec, adapter)) {
    BlockLayout layout;
    // Fresh values are those of a run that trains all.
    std::map<std::string, uint32_t> numbers;
    for (const auto* const list : {&block.trainable, &block.frozen})
      for (const Parameter& parameter : *list)
        numbers[parameter.name] = is_start(parameter.role) ? 0 : ++number;  // nothing of these is drawn
    if (trained && adapter == nullptr) freeze_others(trained, block);
    layout.name = std::move(block.name);
    place_trainable(std::move(block.trainable), layout);
    find_small_runs(layout);
    find_sides(layout);
    layout.body = !model.blocks.empty() && std::ssize(model.blocks) <= spec.layer_count();
    layout.linear = layout.body && std::ranges::none_of(layout.tensors, [](const TensorPlace& place) {
                      return place.parameter.kind == ParameterKind::kEmbedding;
                    });
    place_frozen(std::move(block.frozen), plain, layout.body && encoding != nullptr ? *encoding : plain,
                 layout);
    find_owners(layout.trainables, layout);
    find_owners(layout.starts, layout);
    for (TensorPlace& place : layout.tensors) place.number = numbers.at(place.parameter.name);
    model.trainable_elements += layout.parameter_elements;
    model.frozen_elements += layout.frozen_elements;
    model.flat_elements += layout.flat_elements;
    model.frozen_bytes += layout.frozen_bytes;
    model.blocks.push_back(std::move(layout));
  }
  return model;
}

}  // namespace lm
