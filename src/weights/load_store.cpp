#include "weights/load_store.h"

#include <functional>

#include "weights/adapter_files.h"
#include "weights/initialise.h"
#include "weights/loader.h"

namespace lm {
namespace {

// Units opened for filling, and on a GPU host memory in which tensors are gathered first; `read` fills what
// target() hands out.
class Staging {
 public:
  Staging(const LoadSetup& setup, WeightStore& store) : setup_(setup), store_(store) {}

  // What the unit has of the tensor.
  LoadTarget target(int64_t unit, const TensorPlace& place) {
    if (open_.empty() || open_.back().unit() != unit) open_.push_back(store_.open(unit, true));
    std::byte* const home = open_.back().tensor(place);
    const Unit& range = store_.units()[static_cast<size_t>(unit)];
    LoadTarget target{home, setup_.dtype, range.first_row, range.rows};
    if (setup_.stream.device == DeviceType::kCpu) return target;
    const int64_t rows = range.segment() ? range.rows : place.parameter.rows;
    const int64_t bytes = rows * place.parameter.columns * static_cast<int64_t>(dtype_size(setup_.dtype));
    pieces_.push_back({home, Memory(DeviceType::kCpu, bytes)});
    target.memory = pieces_.back().memory.data();
    return target;
  }

  void finish() {
    for (const Piece& piece : pieces_) {
      copy_bytes(piece.home, piece.memory.data(), piece.memory.size(), setup_.stream);
    }
    pieces_.clear();
    open_.clear();
  }

 private:
  struct Piece {
    std::byte* home;
    Memory memory;
  };
  const LoadSetup& setup_;
  WeightStore& store_;
  std::vector<OpenUnit> open_;
  std::vector<Piece> pieces_;
};

// Calls read(wanted) for all near blocks at once, in the order of the files, then for each streamed block and
// each segment of a cut head by itself, since these pass through one slot.
void by_home(const WeightStore& store, const std::function<void(const std::function<bool(int64_t)>&)>& read) {
  const auto apart = [&](int64_t unit) {
    return store.streamed(unit) || store.units()[static_cast<size_t>(unit)].segment();
  };
  read([&](int64_t unit) { return !apart(unit); });
  for (int64_t u = 0; u < std::ssize(store.units()); ++u) {
    if (apart(u)) read([u](int64_t unit) { return unit == u; });
  }
}

bool is_adapter(const TensorPlace& place) {
  return place.parameter.kind == ParameterKind::kLoraA || place.parameter.kind == ParameterKind::kLoraB;
}

void initialise_where(const LoadSetup& setup, int64_t seed, WeightStore& store,
                      const std::function<bool(const TensorPlace&)>& chosen) {
  uint32_t number = 0;  // counts every tensor, so that a tensor's values do not depend on `chosen`
  for (size_t block = 0; block < setup.layout.blocks.size(); ++block) {
    Staging staging(setup, store);
    for (const TensorPlace& place : setup.layout.blocks[block].tensors) {
      ++number;
      if (!chosen(place)) continue;
      for (const int64_t unit : store.units_of(static_cast<int64_t>(block), place)) {
        const bool segment = store.units()[static_cast<size_t>(unit)].segment();
        if (segment) staging.finish();  // one at a time
        const LoadTarget target = staging.target(unit, place);
        initialise(place.parameter, static_cast<uint64_t>(seed), number, setup.dtype, target.memory,
                   target.first_row, segment ? target.rows : place.parameter.rows);
      }
    }
    staging.finish();
  }
}

}  // namespace

void load_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  const ModelFiles files(directory);
  by_home(store, [&](const std::function<bool(int64_t)>& wanted) {
    Staging staging(setup, store);
    const auto target = [&](size_t block, const TensorPlace& place) {
      for (const int64_t unit : store.units_of(static_cast<int64_t>(block), place)) {
        if (wanted(unit)) return staging.target(unit, place);
      }
      return LoadTarget{nullptr, setup.dtype};
    };
    load_model(files, setup.spec, setup.layout, target, {.threads = setup.threads, .progress = {}});
    staging.finish();
  });
}

void initialise_weights(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, [](const TensorPlace& place) { return !is_adapter(place); });
}

void load_adapter_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  Staging staging(setup, store);
  load_adapter(directory, setup.layout,
               [&](size_t block, const TensorPlace& place) {
                 return staging.target(static_cast<int64_t>(block), place);
               },
               {.threads = setup.threads, .progress = {}});
  staging.finish();
}

void initialise_adapter(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, is_adapter);
}

}  // namespace lm
