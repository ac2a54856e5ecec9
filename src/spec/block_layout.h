// Where each tensor of a block lies: trainable tensors in one flat array (tensors start at multiples of 256
// elements, each weight-decay range at a granule of 4096), frozen tensors in one array of bytes (each of
// their pieces at a multiple of 512 bytes). Torch-free, immutable values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/elements.h"
#include "spec/encoding.h"
#include "spec/parameter.h"

namespace lm {

inline constexpr int64_t kGranule = 4096;      // elements; the unit of norms, tiles, shards
inline constexpr int64_t kTensorStart = 256;   // elements
inline constexpr int64_t kSmallTensor = 4096;  // elements; a trainable tensor with fewer is a small one
// Rows of a vocabulary matrix that are worked on as one; an untied head may be borrowed and transferred by
// them.
inline constexpr int64_t kVocabularySegment = 8192;

// A run of a frozen tensor's bytes.
struct FrozenPiece {
  const Encoding* encoding = nullptr;
  int64_t offset = 0;  // into the block's frozen array
  int64_t bytes = 0;
};

// With what fills it up to the next piece.
int64_t frozen_piece_bytes(const FrozenPiece& piece);

struct TensorPlace {
  Parameter parameter;
  int64_t offset = 0;  // trainable: elements into the flat array; frozen: of the first piece
  bool frozen = false;
  // Of a frozen tensor, in its encoding's order, one behind the other. Each matrix of the files is encoded by
  // itself: where `encoded()`, the pieces of all parts follow each other.
  std::vector<FrozenPiece> pieces = {};
  uint32_t number = 0;  // of the tensor in the model, from 1 on: what fresh values are drawn with
  const Encoding& encoding() const { return *pieces.front().encoding; }
  bool encoded() const { return frozen && !encoding().plain(); }
  // Of a trainable tensor: calls body(first element of the flat array, rows, columns) for each tensor of the
  // files that it consists of, a vector being one row.
  template <class Body>
  void each_part(const Body& body) const {
    for (const ParameterPart& part : parameter.parts) {
      const int64_t first = offset + part.first * parameter.columns;
      parameter.vector() ? body(first, int64_t{1}, part.rows) : body(first, part.rows, parameter.columns);
    }
  }
};

// A run of granules of tensors with weight decay, or without.
struct DecayRange {
  int64_t first = 0;     // element, multiple of kGranule
  int64_t elements = 0;  // multiple of kGranule
  bool decay = false;
};

// Elements of a parameter group (optimizer.groups): tensors of the files, which may begin at any element of a
// tensor of ours.
struct GroupRange {
  int64_t first = 0, elements = 0;
  double lr_scale = 1;                      // of the learning rate
  std::optional<double> weight_decay = {};  // in place of optimizer.weight_decay, and of a vector's 0
};

struct ElementRun {
  int64_t first = 0, end = 0;
};

// Statistics of rows and columns are one matrix of the files behind another, each filled up to so many.
inline constexpr int64_t kStatisticsStart = 64;
struct MatrixSides {
  int64_t offset = 0;             // in the flat array
  int64_t rows = 0, columns = 0;  // filled up
};

// Of each layer's E experts a rank keeps those of its place: [place E / ranks, (place + 1) E / ranks). They
// lie behind what all ranks have alike, and are in no shard. What other ranks keep has no memory here.
struct ExpertShare {
  int ranks = 1;
  int place = 0;
  bool parallel() const { return ranks > 1; }
  int64_t each(int64_t experts) const { return experts / ranks; }
  int owner(int64_t expert, int64_t experts) const { return static_cast<int>(expert / each(experts)); }
  auto operator<=>(const ExpertShare&) const = default;
};

struct BlockLayout {
  std::string name;
  bool body = false;                   // a transformer block
  bool linear = false;                 // its trained matrices are linear layers': not rows of virtual tokens
  std::vector<TensorPlace> tensors;    // trainable, then frozen
  std::vector<Parameter> elsewhere;    // frozen tensors of experts that other ranks keep (ExpertShare)
  std::vector<Trainable> trainables;   // in the order of the flat array
  std::vector<Trainable> starts;       // frozen tensors of an adapter (is_start)
  std::vector<DecayRange> ranges;      // cover the flat array
  std::vector<GroupRange> groups;      // in order; what is in none has the settings of [optimizer]
  std::vector<ElementRun> small_runs;  // of it: of small tensors one behind another
  std::vector<MatrixSides> sides;      // of trainable matrices of the files
  // Granules where a shard may begin that divides no tensor of the files (WholeTensors), in elements; with 0
  // and the end. And how many blocks before this one have the same.
  std::vector<int64_t> borders;
  int64_t turn = 0;
  int64_t flat_elements = 0;       // trainable, padding included; multiple of kGranule (may be 0)
  int64_t parameter_elements = 0;  // trainable, without padding
  int64_t frozen_bytes = 0;
  int64_t own_bytes = 0;        // of these the last: this rank's experts (ExpertShare)
  int64_t frozen_elements = 0;  // of the base, those that other ranks keep among them
  const TensorPlace* find(const std::string& name) const;  // null when absent
  bool trains(const std::string& name) const;              // it is there, and not frozen
  // What has this role beside part `part` of `owner`; null when nothing has.
  const TensorPlace* beside(const TensorPlace& owner, size_t part, TrainableRole role) const;
  // What it belongs to, which another rank may keep.
  const Parameter& owner_of(const Trainable& entry) const;
  // Of the flat array's [from, to): what lies behind a tensor counts as its own, and a matrix that begins
  // there counts with all of its rows and columns.
  Elements count(int64_t from, int64_t to) const;
  // Calls body(first, elements, small) for the longest runs in [from, to) of small tensors and of others.
  template <class Body>
  void each_run(int64_t from, int64_t to, const Body& body) const {
    for (const ElementRun& run : small_runs) {
      const int64_t begin = std::clamp(run.first, from, to), end = std::clamp(run.end, from, to);
      if (begin == end) continue;
      if (from < begin) body(from, begin - from, false);
      body(begin, end - begin, true);
      from = end;
    }
    if (from < to) body(from, to - from, false);
  }
};

// What a unit is to the step: which operations it has, and when.
enum class UnitRole : uint8_t {
  kEmbedding,
  kBody,               // a transformer block
  kHead,               // the final norm and, unless it is tied, the vocabulary matrix
  kFinalNorm,          // a head whose matrix comes in segments: the rest
  kVocabularySegment,  // of that matrix
};
// What is borrowed, transferred and updated as one. Ranges of the block's two arrays, padding included; those
// of the flat array begin and end at granules.
struct Unit {
  int64_t block = 0;
  UnitRole role = UnitRole::kBody;
  int64_t first_row = 0, rows = 0;  // of a vocabulary segment
  int64_t first = 0, elements = 0;  // trainable
  int64_t first_frozen_byte = 0, frozen_bytes = 0;
  int64_t own_bytes = 0;  // the last of the frozen ones, of which there are no shards (ExpertShare)
  int64_t common_bytes() const { return frozen_bytes - own_bytes; }  // the others
  // The block's, which outlives the unit.
  bool linear = false;
  std::span<const int64_t> borders = {};
  int64_t turn = 0;
  bool segment() const { return role == UnitRole::kVocabularySegment; }
  // Whether all of this tensor of the block lies here.
  bool holds(const TensorPlace& place) const;
};

// Tensors of the files that a rule updates whole, and that no shard divides.
enum class WholeTensors : uint8_t { kNone, kOfLinearLayers, kAll };

// A rank's part of a unit's flat array: whole granules. As many on every rank but the last that have some; if
// shards are of whole tensors, the first rank has no less of all blocks together than any.
struct Shard {
  int64_t first = 0;     // element of the block
  int64_t elements = 0;  // may be 0
  int64_t end() const { return first + elements; }
};
Shard shard_of(const Unit& unit, int rank, int ranks);
// How the ranks of a run divide what is sharded: each of a group of neighbouring ranks has another shard, and
// every group has them all. A shard consists of as many parts as it has copies. Each rank adds up one part,
// and saves it.
struct Sharding {
  int ranks = 1;
  int group = 1;  // ranks of a group, which divide `ranks`; 1: every rank has all
  WholeTensors whole = WholeTensors::kNone;
  bool of_whole_tensors(const Unit& unit) const {
    return whole == WholeTensors::kAll || (whole == WholeTensors::kOfLinearLayers && unit.linear);
  }
  int copies() const { return ranks / group; }
  int place(int rank) const { return rank % group; }                          // whose shard the rank has
  int part(int rank) const { return place(rank) * copies() + rank / group; }  // part_of's
  auto operator<=>(const Sharding&) const = default;
};
Shard shard_of(const Unit& unit, const Sharding& sharding, int place);
// The shards of a group, by place.
std::vector<Shard> shards_of_unit(const Unit& unit, const Sharding& sharding);
// Part `part` of `sharding.ranks`. It may divide a tensor, since no update is of a part.
Shard part_of(const Unit& unit, const Sharding& sharding, int part);
// The part of each rank, by rank: a list of all takes little more than one of them.
std::vector<Shard> parts_of_unit(const Unit& unit, const Sharding& sharding);
// Elements of the longest shard, and of the longest part.
int64_t longest_shard(const Unit& unit, const Sharding& sharding);
int64_t longest_part(const Unit& unit, const Sharding& sharding);
// The same of frozen bytes, counted in bytes: equal parts of whole sectors, of which the last ones may be
// shorter.
Shard frozen_shard_of(int64_t bytes, int rank, int ranks);

// The units of a model of L layers without their ranges: one for each block, then the segments of the head's
// matrix, 0 if it is whole. A unit's number is its place in this list.
std::vector<Unit> list_units(int64_t layers, int64_t segments);

struct ModelLayout {
  std::vector<BlockLayout> blocks;  // L + 2
  ExpertShare experts;
  int64_t trainable_elements = 0;  // without padding
  int64_t frozen_elements = 0;
  int64_t flat_elements = 0;  // with padding, over all blocks
  int64_t frozen_bytes = 0;

  // As list_units has them; a tied head has no matrix to cut.
  std::vector<Unit> units(bool chunked_head) const;
  std::string name(const Unit& unit) const;  // "block 3", "head, segment 2"
  // The first block of which something is trained; 0 where nothing is.
  int64_t first_trained() const;
  // By the encodings' names, padding included; together frozen_bytes.
  std::map<std::string, int64_t> frozen_bytes_by_encoding() const;
};

// Whether a parameter of the base model is trained in full fine-tuning; empty: all are, but buffers.
using TrainedFilter = std::function<bool(const Parameter& parameter)>;

// `dtype` is the model's, and what is frozen is stored in it, but for the transformer blocks' frozen matrices
// if `encoding` is not null. `trained`: of full fine-tuning; the others join the block's frozen tensors.
// `share`: of frozen experts; layouts of all places have tensors of the same sizes at the same offsets.
ModelLayout make_layout(const ModelSpec& spec, const AdapterSpec* adapter, DType dtype,
                        const Encoding* encoding = nullptr, const TrainedFilter& trained = {},
                        const ExpertShare& share = {});

// Where the unit's weights are offloaded: whether its frozen bytes move; else its trainable weights do. The
// other part stays on the device. Adapters do, and of a full run's unit the smaller part.
bool moves_frozen(const BlockLayout& block, const Unit& unit, DType trained);

// A model, borrowed.
struct ModelParts {
  const ModelSpec& spec;
  const ModelLayout& layout;
  const AdapterSpec* adapter = nullptr;  // null: full fine-tuning
};

}  // namespace lm
