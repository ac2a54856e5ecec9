#include "weights/load_store.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "base/error.h"
#include "base/philox.h"
#include "base/staging.h"
#include "spec/adapter_sites.h"
#include "weights/adapter_files.h"
#include "weights/convert.h"
#include "weights/encode.h"
#include "weights/initialise.h"
#include "weights/loader.h"
#include "weights/loftq.h"
#include "weights/row_lengths.h"

namespace lm {
namespace {

// Initial elements of part `part` of a tensor.
MatrixElements drawn(const TensorPlace& place, size_t part, uint64_t seed, DType dtype) {
  const int64_t before = place.parameter.parts[part].first * place.parameter.columns;
  return [&place, seed, dtype, before](int64_t first, int64_t n, std::byte* to) {
    initialise_elements({place.parameter, seed, place.number, dtype}, to, before + first, n);
  };
}

// The units open for writing, and the staging buffer for them.
class Filling {
 public:
  Filling(const LoadSetup& setup, WeightStore& store)
      : setup_(setup), store_(store), staging_(setup.stream) {}

  // The tensor's memory in the unit; none if another rank fills it.
  LoadTarget target(int64_t unit, const TensorPlace& place) {
    return target(unit, place, place.parameter.fp32 ? DType::kF32 : setup_.dtype);
  }
  LoadTarget target(int64_t unit, const TensorPlace& place, DType dtype) {
    if (place.frozen && !store_.loads_frozen(unit)) return {nullptr, dtype};
    if (open_.empty() || open_.back().unit() != unit) open_.push_back(store_.open(unit, true));
    const Unit& range = store_.units()[static_cast<size_t>(unit)];
    return {open_.back().tensor(place), dtype, range.first_row, range.rows,
            place.encoded() ? &place : nullptr};
  }
  // A tensor's memory in the first of its units that is wanted; else none.
  FindTarget targets(const std::function<bool(int64_t)>& wanted) {
    return [this, wanted](size_t block, const TensorPlace& place) {
      for (const int64_t unit : store_.units_of(static_cast<int64_t>(block), place)) {
        if (wanted(unit)) return target(unit, place);
      }
      return LoadTarget{nullptr, setup_.dtype};
    };
  }
  LoadOptions options() {
    return {.threads = setup_.threads, .staging = staging_.used() ? &staging_ : nullptr};
  }

  void initialise(const TensorPlace& place, uint64_t seed, const LoadTarget& target) {
    if (target.memory != nullptr && target.encoded != nullptr) return initialise_encoded(place, seed, target);
    by_rows(place.parameter, target, [&](int64_t row, int64_t rows, std::byte* here) {
      lm::initialise({place.parameter, seed, place.number, target.dtype}, here, row, rows, setup_.threads);
    });
  }

  // Writes all elements of a parameter.
  void put(const Parameter& parameter, const std::vector<float>& values, const LoadTarget& target) {
    by_rows(parameter, target, [&](int64_t row, int64_t rows, std::byte* here) {
      const float* const from = values.data() + row * parameter.columns;
      convert_elements(reinterpret_cast<const std::byte*>(from), DType::kF32, here, target.dtype,
                       rows * parameter.columns);
    });
  }

  // Calls make(row, rows, memory for them) for the target's rows, in chunks.
  template <class Make>
  void by_rows(const Parameter& parameter, const LoadTarget& target, const Make& make) {
    if (target.memory == nullptr) return;
    const int64_t end = target.first_row + (target.rows > 0 ? target.rows : parameter.rows);
    const int64_t row_bytes = parameter.columns * static_cast<int64_t>(dtype_size(target.dtype));
    const int64_t most = staging_.used() ? staging_.piece_bytes() / row_bytes : end;
    LM_CHECK(most > 0, "a row of " + parameter.name + " is larger than half of the staging buffer");
    std::byte* to = target.memory;
    for (int64_t row = target.first_row; row < end; row += most) {
      const int64_t rows = std::min(most, end - row);
      std::byte* const here = staging_.used() ? staging_.next() : to;
      make(row, rows, here);
      if (staging_.used()) staging_.send(to, here, rows * row_bytes);
      to += rows * row_bytes;
    }
  }

  void initialise_encoded(const TensorPlace& place, uint64_t seed, const LoadTarget& target) {
    for (size_t p = 0; p < place.parameter.parts.size(); ++p) {
      write_encoded(place, p, target.memory, options().staging, [&](const EncodedMatrix& matrix) {
        encode(matrix, setup_.dtype, drawn(place, p, seed, setup_.dtype), setup_.threads);
      });
    }
  }

  // Starts the units' write-backs, which the stream orders after the copies into them.
  void close() {
    for (OpenUnit& open : open_) open.close();
    open_.clear();
  }
  // Waits until all weights are on their tier.
  void finish() {
    close();
    staging_.finish();
  }

 private:
  const LoadSetup& setup_;
  WeightStore& store_;
  Staging staging_;
  std::vector<OpenUnit> open_;
};

// Calls read(wanted) for all blocks on the device together, in the order of the files, then for each other
// block and each segment of a vocabulary-chunked head separately, since these share one slot.
void by_tier(const WeightStore& store, const std::function<void(const std::function<bool(int64_t)>&)>& read) {
  const auto by_itself = [&](int64_t unit) {
    return store.through_slots(unit) || store.units()[static_cast<size_t>(unit)].segment();
  };
  read([&](int64_t unit) { return !by_itself(unit); });
  for (int64_t u = 0; u < std::ssize(store.units()); ++u) {
    if (by_itself(u)) read([u](int64_t unit) { return unit == u; });
  }
}

// These tokens' rows of the base's embedding.
std::vector<float> embedding_rows(const LoadSetup& setup, uint64_t seed, const std::string& directory,
                                  std::span<const int64_t> tokens) {
  const TensorPlace& table = *setup.layout.blocks.front().find("embed");
  std::optional<ModelFiles> files;
  if (!directory.empty()) files.emplace(directory);
  const MatrixElements elements =
      files ? elements_of(*files, table.parameter, 0, DType::kF32) : drawn(table, 0, seed, DType::kF32);
  const int64_t columns = table.parameter.columns;
  std::vector<float> values(tokens.size() * static_cast<size_t>(columns));
  for (size_t i = 0; i < tokens.size(); ++i)
    elements(tokens[i] * columns, columns,
             reinterpret_cast<std::byte*>(values.data() + static_cast<int64_t>(i) * columns));
  return values;
}

// For a prompt: embeddings of tokens drawn from the vocabulary, as a layer sees them.
std::vector<float> drawn_embeddings(const LoadSetup& setup, uint64_t seed, const std::string& directory,
                                    const TensorPlace& prompt) {
  const int64_t vocab = setup.layout.blocks.front().find("embed")->parameter.rows;
  const EmbeddingSpec& spec = setup.spec.embedding;
  const auto scale = static_cast<float>(spec.scales_prompt ? 1 : spec.scale);
  const uint64_t key = philox_key(seed, Purpose::kInit, 0, prompt.number);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < prompt.parameter.rows; ++i) {
    const int64_t word = philox_at(key, static_cast<uint64_t>(i), 0, 0);
    tokens.push_back(word * vocab >> 32);
  }
  std::vector<float> values = embedding_rows(setup, seed, directory, tokens);
  for (float& value : values) value *= scale;
  return values;
}

void initialise_where(const LoadSetup& setup, int64_t seed, WeightStore& store,
                      const std::function<bool(const Parameter&)>& wanted) {
  Filling filling(setup, store);
  for (size_t block = 0; block < setup.layout.blocks.size(); ++block) {
    for (const TensorPlace& place : setup.layout.blocks[block].tensors) {
      if (!wanted(place.parameter)) continue;
      for (const int64_t unit : store.units_of(static_cast<int64_t>(block), place)) {
        if (store.units()[static_cast<size_t>(unit)].segment()) filling.close();  // one at a time
        filling.initialise(place, static_cast<uint64_t>(seed), filling.target(unit, place));
      }
    }
    filling.close();
  }
  filling.finish();
}

}  // namespace

void load_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  const ModelFiles files(directory);
  Filling filling(setup, store);
  by_tier(store, [&](const std::function<bool(int64_t)>& wanted) {
    load_model(files, setup.spec, setup.layout, filling.targets(wanted), filling.options());
    filling.close();
  });
  filling.finish();
}

void initialise_weights(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, [](const Parameter& p) { return !in_adapter(p.role); });
}

void load_adapter_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  Filling filling(setup, store);
  LoadOptions options = filling.options();
  options.base = &setup.spec;
  options.base_directory = setup.base;
  const auto is_segment = [&](int64_t unit) { return store.units()[static_cast<size_t>(unit)].segment(); };
  load_adapter(directory, setup.layout, filling.targets([&](int64_t unit) { return !is_segment(unit); }),
               options);
  options.base_directory.clear();  // compared already
  for (int64_t u = 0; u < std::ssize(store.units()); ++u) {
    if (!is_segment(u) || store.units()[static_cast<size_t>(u)].elements == 0) continue;
    load_adapter(directory, setup.layout, filling.targets([u](int64_t unit) { return unit == u; }), options);
  }
  filling.finish();
}

void initialise_adapter(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, [](const Parameter& p) {
    return adapts(p.role) && !is_start(p.role) && p.role != TrainableRole::kTokenRows;
  });
}

void initialise_head(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, [](const Parameter& p) { return p.name == "head"; });
}

void start_whole_tensors(const LoadSetup& setup, int64_t seed, const std::string& directory,
                         WeightStore& store) {
  const auto drawn = [&](const Parameter& parameter) {
    const bool fresh_head = setup.spec.score.fresh && parameter.name == "head";
    return parameter.role == TrainableRole::kWhole && (directory.empty() || fresh_head);
  };
  initialise_where(setup, seed, store, drawn);
  if (directory.empty()) return;
  const ModelFiles files(directory);
  Filling filling(setup, store);
  by_tier(store, [&](const std::function<bool(int64_t)>& wanted) {
    load_whole_tensors(files, setup.spec, setup.layout, filling.targets(wanted), filling.options());
    filling.close();
  });
  filling.finish();
}

void start_token_rows(const LoadSetup& setup, int64_t seed, const std::string& directory,
                      std::span<const int64_t> tokens, WeightStore& store) {
  const BlockLayout& block = setup.layout.blocks.front();
  const TensorPlace* const rows = block.find("embed.tokens");
  if (rows == nullptr) return;
  const std::vector<float> values = embedding_rows(setup, static_cast<uint64_t>(seed), directory, tokens);
  Filling filling(setup, store);
  filling.put(rows->parameter, values, filling.target(0, *rows));
  filling.finish();
}

void initialise_from_base(const LoadSetup& setup, int64_t signed_seed, const AdapterBase& base,
                          const AdapterSpec& adapter, WeightStore& store) {
  const auto seed = static_cast<uint64_t>(signed_seed);
  std::optional<ModelFiles> files;
  if (!base.directory.empty()) files.emplace(base.directory);
  LoftqSetup with{.spec = setup.spec,
                  .scale = 1,
                  .dtype = base.dtype,
                  .threads = setup.threads,
                  .elements = [&](const TensorPlace& place, size_t part) {
                    if (!files) return drawn(place, part, seed, base.dtype);
                    return elements_of(*files, stored_in_base(place.parameter), part, base.dtype);
                  }};
  Filling filling(setup, store);
  for (int64_t layer = 0; layer < setup.spec.layer_count(); ++layer) {
    const int64_t unit = layer + 1;
    const BlockLayout& block = setup.layout.blocks[static_cast<size_t>(unit)];
    const LoftqBlock loftq(with, setup.spec.layer(layer), block);
    for (const Trainable& entry : block.trainables) {
      if (entry.role != TrainableRole::kLoraA) continue;
      const TensorPlace &weight = block.tensors[entry.owner], &a = block.tensors[entry.tensor],
                        &b = *block.beside(weight, entry.part, TrainableRole::kLoraB);
      std::vector<float> of_a(static_cast<size_t>(a.parameter.elements())),
          of_b(static_cast<size_t>(b.parameter.elements()));
      lm::initialise({a.parameter, seed, a.number, DType::kF32}, reinterpret_cast<std::byte*>(of_a.data()), 0,
                     a.parameter.rows, setup.threads);
      with.scale = adapter.scale_of(a.parameter.site);
      if (base.loftq)
        loftq.start(weight, entry.part, philox_key(seed, Purpose::kInit, 1, a.number), of_a, of_b);
      filling.put(a.parameter, of_a, filling.target(unit, a));
      filling.put(b.parameter, of_b, filling.target(unit, b));
      const TensorPlace* const magnitude = block.beside(weight, entry.part, TrainableRole::kMagnitude);
      if (magnitude == nullptr) continue;
      const AdaptedMatrix adapted{
          .weight = rows_of_base(weight, entry.part, files ? &*files : nullptr,
                                 drawn(weight, entry.part, seed, base.dtype), base.dtype, setup.threads),
          .rows = magnitude->parameter.rows,
          .columns = weight.parameter.columns,
          .a = of_a,
          .b = of_b,
          .scale = with.scale};
      filling.put(magnitude->parameter, row_lengths(adapted, setup.threads),
                  filling.target(unit, *magnitude));
    }
    filling.close();
  }
  filling.finish();
}

void place_starts(const LoadSetup& setup, const PrincipalPairs& pairs, bool fresh, WeightStore& store) {
  Filling filling(setup, store);
  for (size_t b = 0; b < setup.layout.blocks.size(); ++b) {
    const BlockLayout& block = setup.layout.blocks[b];
    const auto unit = static_cast<int64_t>(b);
    const auto put = [&](const TensorPlace& place, const std::vector<float>& values, DType dtype) {
      filling.put(place.parameter, values, filling.target(unit, place, dtype));
    };
    for (const Trainable& entry : block.trainables) {
      if (entry.role != TrainableRole::kLoraA) continue;
      const TensorPlace& weight = block.tensors[entry.owner];
      const auto beside = [&](TrainableRole role) -> const TensorPlace& {
        return *block.beside(weight, entry.part, role);
      };
      PrincipalPair pair = pairs.pair(block, entry);
      if (fresh) put(block.tensors[entry.tensor], pair.a, store.dtype());
      if (fresh) put(beside(TrainableRole::kLoraB), pair.b, store.dtype());
      for (float& value : pair.b) value = -value;
      put(beside(TrainableRole::kStartA), pair.a, setup.dtype);
      put(beside(TrainableRole::kStartB), pair.b, setup.dtype);
    }
    filling.close();
  }
  filling.finish();
}

void copy_replaced(const LoadSetup& setup, int64_t seed, const std::string& directory, WeightStore& store) {
  const auto is_copy = [](TrainableRole role) {
    return role == TrainableRole::kReplacement || role == TrainableRole::kBias;
  };
  // Those of drawn weights are drawn alike: norms and biases begin with fixed values.
  if (directory.empty())
    return initialise_where(setup, seed, store, [&](const Parameter& p) { return is_copy(p.role); });
  const ModelFiles files(directory);
  Filling filling(setup, store);
  for (size_t b = 0; b < setup.layout.blocks.size(); ++b) {
    const BlockLayout& block = setup.layout.blocks[b];
    for (const Trainable& entry : block.trainables) {
      if (!is_copy(entry.role)) continue;
      const TensorPlace &copy = block.tensors[entry.tensor], &owner = block.tensors[entry.owner];
      std::vector<float> values(static_cast<size_t>(copy.parameter.elements()));
      elements_of(files, owner.parameter, entry.part, DType::kF32)(
          0, std::ssize(values), reinterpret_cast<std::byte*>(values.data()));
      filling.put(copy.parameter, values, filling.target(static_cast<int64_t>(b), copy));
    }
    filling.close();
  }
  filling.finish();
}

void start_virtual_tokens(const LoadSetup& setup, int64_t seed, const std::string& directory,
                          WeightStore& store) {
  Filling filling(setup, store);
  for (size_t b = 0; b < setup.layout.blocks.size(); ++b) {
    const BlockLayout& block = setup.layout.blocks[b];
    for (const Trainable& entry : block.trainables) {
      const TensorPlace& place = block.tensors[entry.tensor];
      std::vector<float> values(static_cast<size_t>(place.parameter.elements()));
      if (entry.role == TrainableRole::kPrompt)
        values = drawn_embeddings(setup, static_cast<uint64_t>(seed), directory, place);
      filling.put(place.parameter, values, filling.target(static_cast<int64_t>(b), place));
    }
    filling.close();
  }
  filling.finish();
}

}  // namespace lm
