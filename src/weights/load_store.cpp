#include "weights/load_store.h"

#include <functional>

#include "weights/adapter_files.h"
#include "weights/initialise.h"
#include "weights/loader.h"

namespace lm {
namespace {

std::byte* home_of(const LoadSetup& setup, WeightStore& store, size_t block, const TensorPlace& place) {
  const auto b = static_cast<int64_t>(block);
  return place.frozen
             ? store.frozen_home(b) + place.offset
             : store.trainable_home(b) + place.offset * static_cast<int64_t>(dtype_size(setup.dtype));
}

int64_t place_bytes(const LoadSetup& setup, const TensorPlace& place) {
  return place.parameter.elements() * static_cast<int64_t>(dtype_size(setup.dtype));
}

// On a GPU tensors are gathered in host memory first; `read` fills what target() hands out.
class Staging {
 public:
  Staging(const LoadSetup& setup, WeightStore& store) : setup_(setup), store_(store) {}

  LoadTarget target(size_t block, const TensorPlace& place) {
    std::byte* const home = home_of(setup_, store_, block, place);
    if (setup_.stream.device == DeviceType::kCpu) return {home, setup_.dtype};
    pieces_.push_back({home, Memory(DeviceType::kCpu, place_bytes(setup_, place))});
    return {pieces_.back().memory.data(), setup_.dtype};
  }

  void finish() {
    for (const Piece& piece : pieces_) {
      copy_bytes(piece.home, piece.memory.data(), piece.memory.size(), setup_.stream);
    }
    pieces_.clear();
  }

 private:
  struct Piece {
    std::byte* home;
    Memory memory;
  };
  const LoadSetup& setup_;
  WeightStore& store_;
  std::vector<Piece> pieces_;
};

bool is_adapter(const TensorPlace& place) {
  return place.parameter.kind == ParameterKind::kLoraA || place.parameter.kind == ParameterKind::kLoraB;
}

void initialise_where(const LoadSetup& setup, int64_t seed, WeightStore& store,
                      const std::function<bool(const TensorPlace&)>& chosen) {
  Staging staging(setup, store);
  uint32_t number = 0;  // counts every tensor, so that a tensor's values do not depend on `chosen`
  for (size_t block = 0; block < setup.layout.blocks.size(); ++block) {
    for (const TensorPlace& place : setup.layout.blocks[block].tensors) {
      ++number;
      if (!chosen(place)) continue;
      initialise(place.parameter, static_cast<uint64_t>(seed), number, setup.dtype,
                 staging.target(block, place).memory);
    }
  }
  staging.finish();
}

}  // namespace

void load_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  const ModelFiles files(directory);
  Staging staging(setup, store);
  load_model(files, setup.spec, setup.layout,
             [&](size_t block, const TensorPlace& place) { return staging.target(block, place); },
             {.threads = setup.threads, .progress = {}});
  staging.finish();
}

void initialise_weights(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, [](const TensorPlace& place) { return !is_adapter(place); });
}

void load_adapter_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  Staging staging(setup, store);
  load_adapter(directory, setup.layout,
               [&](size_t block, const TensorPlace& place) { return staging.target(block, place); },
               {.threads = setup.threads, .progress = {}});
  staging.finish();
}

void initialise_adapter(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, is_adapter);
}

}  // namespace lm
