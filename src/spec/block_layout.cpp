#include "spec/block_layout.h"

#include <fmt/format.h>
#include <algorithm>
#include <iterator>
#include <string_view>
#include <tuple>
#include <unordered_map>
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
    place.each_part([&](int64_t first, int64_t rows, int64_t columns) {
      layout.sides.push_back({first, round_up(rows, kStatisticsStart), round_up(columns, kStatisticsStart)});
    });
  }
}

// What lies behind a tensor counts as its own: the last granule before the next one that is not in it.
void find_borders(BlockLayout& layout) {
  layout.borders = {0};
  int64_t end = 0;
  for (const TensorPlace& place : layout.tensors) {
    if (place.frozen) continue;
    place.each_part([&](int64_t first, int64_t rows, int64_t columns) {
      const int64_t border = first / kGranule * kGranule;
      if (border >= end && border > layout.borders.back()) layout.borders.push_back(border);
      end = first + rows * columns;
    });
  }
  if (layout.flat_elements > 0) layout.borders.push_back(layout.flat_elements);
}

int64_t longest_tensor(const BlockLayout& block) {
  int64_t longest = 0;
  for (size_t i = 1; i < block.borders.size(); ++i)
    longest = std::max(longest, block.borders[i] - block.borders[i - 1]);
  return longest;
}

// Of embedding and head the larger matrix is the first rank's, and the other one the last rank's.
void find_turns(ModelLayout& model) {
  std::map<std::vector<int64_t>, int64_t> like;
  for (BlockLayout& block : model.blocks) {
    if (block.body) block.turn = like[block.borders]++;
  }
  BlockLayout &embedding = model.blocks.front(), &head = model.blocks.back();
  (longest_tensor(embedding) < longest_tensor(head) ? embedding : head).turn = 1;
}

// Owners are looked up by name here, once all tensors are placed. With pairs of experts there are thousands.
void find_owners(std::vector<Trainable>& entries, const BlockLayout& layout) {
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> tensors;  // and parts, by name
  for (size_t t = 0; t < layout.tensors.size(); ++t) {
    const std::vector<ParameterPart>& parts = layout.tensors[t].parameter.parts;
    for (size_t p = 0; p < parts.size(); ++p) tensors[parts[p].name] = {t, p};
  }
  for (size_t t = 0; t < layout.elsewhere.size(); ++t)
    tensors[layout.elsewhere[t].parts.front().name] = {layout.tensors.size() + t, 0};
  for (Trainable& entry : entries) {
    const std::string& owner = layout.tensors[entry.tensor].parameter.owner;
    if (owner.empty()) continue;
    const auto found = tensors.find(owner);
    LM_CHECK(found != tensors.end() && found->second.first != entry.tensor, owner);
    std::tie(entry.owner, entry.part) = found->second;
  }
}

// They come before the block's buffers: a head's matrix is the first of the frozen tensors, too.
void freeze_others(const TrainedFilter& trained, BlockParameters& block) {
  const auto others = std::stable_partition(block.trainable.begin(), block.trainable.end(), trained);
  block.frozen.insert(block.frozen.begin(), std::make_move_iterator(others),
                      std::make_move_iterator(block.trainable.end()));
  block.trainable.erase(others, block.trainable.end());
}

void place_frozen(std::vector<Parameter>&& parameters, const Encoding& plain, const Encoding& of_matrices,
                  BlockLayout& layout) {
  for (Parameter& parameter : parameters) {
    const bool start = is_start(parameter.role);
    const bool encodes = parameter.kind == ParameterKind::kMatrix && !parameter.plain && !start;
    const bool takes = of_matrices.kind != EncodingKind::kMxfp4 || parameter.of_expert();
    const Encoding& whole = parameter.fp32 ? plain_encoding(DType::kF32) : plain;
    const Encoding& encoding = encodes && takes ? of_matrices : whole;
    if (start) layout.starts.push_back({.tensor = layout.tensors.size(), .role = parameter.role});
    TensorPlace place{.parameter = std::move(parameter), .offset = layout.frozen_bytes, .frozen = true};
    const auto add = [&](int64_t rows) {
      for (const int64_t bytes : encoding.piece_bytes(rows, place.parameter.columns)) {
        place.pieces.push_back({&encoding, layout.frozen_bytes, bytes});
        layout.frozen_bytes += frozen_piece_bytes(place.pieces.back());
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

// Takes the tensors of experts that other ranks keep out of `block.frozen`, and puts this rank's last.
void leave_to_others(const ModelSpec& spec, int64_t layer, const ExpertShare& share, BlockParameters& block,
                     BlockLayout& layout) {
  const auto* const experts = spec.layer(layer).find<ExpertsSpec>();
  if (!share.parallel() || experts == nullptr) return;
  LM_CHECK(experts->experts % share.ranks == 0, "every rank keeps equally many experts");
  const auto others =
      std::stable_partition(block.frozen.begin(), block.frozen.end(), [&](const Parameter& parameter) {
        return !parameter.of_expert() || share.owner(parameter.expert, experts->experts) == share.place;
      });
  for (auto other = others; other != block.frozen.end(); ++other) layout.frozen_elements += other->elements();
  layout.elsewhere.assign(std::make_move_iterator(others), std::make_move_iterator(block.frozen.end()));
  block.frozen.erase(others, block.frozen.end());
  std::stable_partition(block.frozen.begin(), block.frozen.end(),
                        [](const Parameter& parameter) { return !parameter.of_expert(); });
}

// Of a layout in which other ranks keep some of the experts: what this rank's have.
int64_t bytes_of_own_experts(const BlockLayout& layout) {
  const auto first = std::ranges::find_if(
      layout.tensors, [](const TensorPlace& place) { return place.frozen && place.parameter.of_expert(); });
  return layout.elsewhere.empty() || first == layout.tensors.end() ? 0 : layout.frozen_bytes - first->offset;
}

// Calls body(run) for runs of neighbouring tensors with at most `most` elements each; a tensor with more is a
// run of its own.
template <class Body>
void each_run_up_to(const Unit& unit, int64_t most, const Body& body) {
  Shard run{unit.first, 0};
  const auto take = [&](int64_t border) {
    if (border <= run.end()) return;
    if (run.elements > 0 && border - run.first > most) {
      body(run);
      run = {run.end(), 0};
    }
    run.elements = border - run.first;
  };
  const int64_t end = unit.first + unit.elements;
  for (const int64_t border : unit.borders) take(std::min(border, end));
  take(end);
  if (run.elements > 0) body(run);
}

// The `most` with which each_run_up_to gives no more than `count` runs, and the longest is as short as it can
// be. A planner asks for every unit and candidate: without a list of the runs.
int64_t most_in_run(const Unit& unit, int count) {
  int64_t most = unit.elements, least = 0;  // enough; too little
  while (most - least > kGranule) {
    const int64_t middle = least + (most - least) / 2;
    int64_t runs = 0;
    each_run_up_to(unit, middle, [&](const Shard&) { ++runs; });
    (runs <= count ? most : least) = middle;
  }
  return most;
}

// The unit in `count` runs of neighbouring tensors, the longest first. Some may be empty.
std::vector<Shard> runs_of_tensors(const Unit& unit, int count) {
  std::vector<Shard> runs;
  each_run_up_to(unit, most_in_run(unit, count), [&](const Shard& run) { runs.push_back(run); });
  std::ranges::stable_sort(runs, std::ranges::greater(), &Shard::elements);
  runs.resize(static_cast<size_t>(count), {.first = unit.first + unit.elements, .elements = 0});
  return runs;
}

// Of a shard of whole tensors.
Shard part_of_shard(const Shard& shard, const Sharding& sharding, int part) {
  const Unit alone{.first = shard.first, .elements = shard.elements};
  return shard_of(alone, part % sharding.copies(), sharding.copies());
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

int64_t frozen_piece_bytes(const FrozenPiece& piece) {
  return round_up(piece.bytes, kFrozenStart);
}

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
  if (sharding.of_whole_tensors(unit)) return shards_of_unit(unit, sharding)[static_cast<size_t>(place)];
  const int copies = sharding.copies(), first = place * copies;
  const int64_t begin = shard_of(unit, first, sharding.ranks).first;
  return {.first = begin, .elements = shard_of(unit, first + copies - 1, sharding.ranks).end() - begin};
}

std::vector<Shard> shards_of_unit(const Unit& unit, const Sharding& sharding) {
  std::vector<Shard> out;
  if (!sharding.of_whole_tensors(unit)) {
    for (int place = 0; place < sharding.group; ++place) out.push_back(shard_of(unit, sharding, place));
    return out;
  }
  const std::vector<Shard> runs = runs_of_tensors(unit, sharding.group);
  for (int64_t place = 0; place < sharding.group; ++place)
    out.push_back(runs[static_cast<size_t>((place + unit.turn) % sharding.group)]);
  return out;
}

Shard part_of(const Unit& unit, const Sharding& sharding, int part) {
  if (!sharding.of_whole_tensors(unit)) return shard_of(unit, part, sharding.ranks);
  return part_of_shard(shard_of(unit, sharding, part / sharding.copies()), sharding, part);
}

std::vector<Shard> parts_of_unit(const Unit& unit, const Sharding& sharding) {
  std::vector<Shard> out;
  const bool whole = sharding.of_whole_tensors(unit);
  const std::vector<Shard> shards = whole ? shards_of_unit(unit, sharding) : std::vector<Shard>();
  for (int rank = 0; rank < sharding.ranks; ++rank) {
    const int part = sharding.part(rank);
    out.push_back(whole ? part_of_shard(shards[static_cast<size_t>(sharding.place(rank))], sharding, part)
                        : shard_of(unit, part, sharding.ranks));
  }
  return out;
}

int64_t longest_shard(const Unit& unit, const Sharding& sharding) {
  if (!sharding.of_whole_tensors(unit)) return shard_of(unit, sharding, 0).elements;
  int64_t longest = 0;
  each_run_up_to(unit, most_in_run(unit, sharding.group),
                 [&](const Shard& run) { longest = std::max(longest, run.elements); });
  return longest;
}

int64_t longest_part(const Unit& unit, const Sharding& sharding) {
  if (!sharding.of_whole_tensors(unit)) return shard_of(unit, 0, sharding.ranks).elements;
  return ceil_div(longest_shard(unit, sharding) / kGranule, sharding.copies()) * kGranule;
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
    const BlockLayout& block = blocks[static_cast<size_t>(unit.block)];
    unit.linear = block.linear, unit.borders = block.borders, unit.turn = block.turn;
    if (unit.segment()) continue;
    unit.elements = block.flat_elements;
    unit.frozen_bytes = block.frozen_bytes, unit.own_bytes = block.own_bytes;
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
  if (unit.common_bytes() == 0) return false;
  const bool beside =
      std::ranges::any_of(block.trainables, [](const Trainable& entry) { return adapts(entry.role); });
  return beside || unit.common_bytes() > unit.elements * static_cast<int64_t>(dtype_size(trained));
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
  const auto number = static_cast<size_t>(&owner - tensors.data());
  for (const Trainable& entry : is_start(role) ? starts : trainables) {
    if (entry.role == role && entry.owner == number && entry.part == part) return &tensors[entry.tensor];
  }
  return nullptr;
}

const Parameter& BlockLayout::owner_of(const Trainable& entry) const {
  return entry.owner < tensors.size() ? tensors[entry.owner].parameter
                                      : elsewhere[entry.owner - tensors.size()];
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
      for (const FrozenPiece& piece : place.pieces) out[piece.encoding->name] += frozen_piece_bytes(piece);
    }
  }
  return out;
}

ModelLayout make_layout(const ModelSpec& spec, const AdapterSpec* adapter, DType dtype,
                        const Encoding* encoding, const TrainedFilter& trained, const ExpertShare& share) {
  const Encoding& plain = plain_encoding(dtype);
  ModelLayout model{.blocks = {}, .experts = share};
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
    find_borders(layout);
    layout.body = !model.blocks.empty() && std::ssize(model.blocks) <= spec.layer_count();
    layout.linear = layout.body && std::ranges::none_of(layout.tensors, [](const TensorPlace& place) {
                      return place.parameter.kind == ParameterKind::kEmbedding;
                    });
    if (layout.body) leave_to_others(spec, std::ssize(model.blocks) - 1, share, block, layout);
    place_frozen(std::move(block.frozen), plain, layout.body && encoding != nullptr ? *encoding : plain,
                 layout);
    layout.own_bytes = bytes_of_own_experts(layout);
    find_owners(layout.trainables, layout);
    find_owners(layout.starts, layout);
    for (TensorPlace& place : layout.tensors) place.number = numbers.at(place.parameter.name);
    model.trainable_elements += layout.parameter_elements;
    model.frozen_elements += layout.frozen_elements;
    model.flat_elements += layout.flat_elements;
    model.frozen_bytes += layout.frozen_bytes;
    model.blocks.push_back(std::move(layout));
  }
  find_turns(model);
  return model;
}

}  // namespace lm
