#include "weights/load_store.h"

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "base/staging.h"
#include "weights/adapter_files.h"
#include "weights/encode.h"
#include "weights/initialise.h"
#include "weights/loader.h"

namespace lm {
namespace {

// Units opened for filling, and the way there.
class Filling {
 public:
  Filling(const LoadSetup& setup, WeightStore& store)
      : setup_(setup), store_(store), staging_(setup.stream) {}

  // Where the unit has the tensor.
  LoadTarget target(int64_t unit, const TensorPlace& place) {
    if (open_.empty() || open_.back().unit() != unit) open_.push_back(store_.open(unit, true));
    const Unit& range = store_.units()[static_cast<size_t>(unit)];
    return {open_.back().tensor(place), setup_.dtype, range.first_row, range.rows,
            place.encoded() ? &place : nullptr};
  }
  LoadOptions options() {
    return {.threads = setup_.threads, .progress = {}, .staging = staging_.used() ? &staging_ : nullptr};
  }

  void initialise(const Parameter& parameter, int64_t seed, uint32_t number, const LoadTarget& target) {
    if (target.encoded != nullptr) return initialise_encoded(parameter, seed, number, target);
    const int64_t end = target.first_row + (target.rows > 0 ? target.rows : parameter.rows);
    const int64_t row_bytes = parameter.columns * static_cast<int64_t>(dtype_size(setup_.dtype));
    const int64_t most = staging_.used() ? staging_.piece_bytes() / row_bytes : end;
    LM_CHECK(most > 0, "a row of " + parameter.name + " is larger than half of the staging buffer");
    std::byte* to = target.memory;
    for (int64_t row = target.first_row; row < end; row += most) {
      const int64_t rows = std::min(most, end - row);
      std::byte* const here = staging_.used() ? staging_.next() : to;
      lm::initialise(parameter, static_cast<uint64_t>(seed), number, setup_.dtype, here, row, rows,
                     setup_.threads);
      if (staging_.used()) staging_.send(to, here, rows * row_bytes);
      to += rows * row_bytes;
    }
  }

  void initialise_encoded(const Parameter& parameter, int64_t seed, uint32_t number,
                          const LoadTarget& target) {
    for (size_t p = 0; p < parameter.parts.size(); ++p) {
      const int64_t before = parameter.parts[p].first * parameter.columns;
      const MatrixElements elements = [&](int64_t first, int64_t n, std::byte* to) {
        initialise_elements(parameter, static_cast<uint64_t>(seed), number, setup_.dtype, to, before + first,
                            n);
      };
      write_encoded(*target.encoded, p, target.memory, options().staging, [&](const EncodedMatrix& matrix) {
        encode(matrix, setup_.dtype, elements, setup_.threads);
      });
    }
  }

  // Units go home: what was sent to them is in front of that in the stream.
  void close() {
    for (OpenUnit& open : open_) open.close();
    open_.clear();
  }
  // Everything is where it belongs.
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

// Calls read(wanted) for all blocks on the device at once, in the order of the files, then for each
// other block and each segment of a cut head by itself, since these pass through one slot.
void by_home(const WeightStore& store, const std::function<void(const std::function<bool(int64_t)>&)>& read) {
  const auto by_itself = [&](int64_t unit) {
    return store.through_slots(unit) || store.units()[static_cast<size_t>(unit)].segment();
  };
  read([&](int64_t unit) { return !by_itself(unit); });
  for (int64_t u = 0; u < std::ssize(store.units()); ++u) {
    if (by_itself(u)) read([u](int64_t unit) { return unit == u; });
  }
}

bool is_adapter(const TensorPlace& place) {
  return place.parameter.kind == ParameterKind::kLoraA || place.parameter.kind == ParameterKind::kLoraB;
}

void initialise_where(const LoadSetup& setup, int64_t seed, WeightStore& store,
                      const std::function<bool(const TensorPlace&)>& chosen) {
  uint32_t number = 0;  // counts every tensor, so that a tensor's values do not depend on `chosen`
  Filling filling(setup, store);
  for (size_t block = 0; block < setup.layout.blocks.size(); ++block) {
    for (const TensorPlace& place : setup.layout.blocks[block].tensors) {
      ++number;
      if (!chosen(place)) continue;
      for (const int64_t unit : store.units_of(static_cast<int64_t>(block), place)) {
        if (store.units()[static_cast<size_t>(unit)].segment()) filling.close();  // one at a time
        filling.initialise(place.parameter, seed, number, filling.target(unit, place));
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
  by_home(store, [&](const std::function<bool(int64_t)>& wanted) {
    const auto target = [&](size_t block, const TensorPlace& place) {
      for (const int64_t unit : store.units_of(static_cast<int64_t>(block), place)) {
        if (wanted(unit)) return filling.target(unit, place);
      }
      return LoadTarget{nullptr, setup.dtype};
    };
    load_model(files, setup.spec, setup.layout, target, filling.options());
    filling.close();
  });
  filling.finish();
}

void initialise_weights(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, [](const TensorPlace& place) { return !is_adapter(place); });
}

void load_adapter_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  Filling filling(setup, store);
  load_adapter(
      directory, setup.layout,
      [&](size_t block, const TensorPlace& place) {
        return filling.target(static_cast<int64_t>(block), place);
      },
      filling.options());
  filling.finish();
}

void initialise_adapter(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, is_adapter);
}

}  // namespace lm
