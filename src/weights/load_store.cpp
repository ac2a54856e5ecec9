#include "weights/load_store.h"

#include <functional>

#include "weights/adapter_files.h"
#include "weights/initialise.h"
#include "weights/loader.h"

namespace lm {
namespace {

int64_t place_bytes(const LoadSetup& setup, const TensorPlace& place) {
  return place.parameter.elements() * static_cast<int64_t>(dtype_size(setup.dtype));
}

// Blocks opened for filling, and on a GPU host memory in which tensors are gathered first; `read` fills what
// target() hands out.
class Staging {
 public:
  Staging(const LoadSetup& setup, WeightStore& store) : setup_(setup), store_(store) {}

  LoadTarget target(size_t block, const TensorPlace& place) {
    if (open_.empty() || open_.back().block() != static_cast<int64_t>(block))
      open_.push_back(store_.open(static_cast<int64_t>(block), true));
    const OpenBlock& b = open_.back();
    std::byte* const home =
        place.frozen ? b.frozen() + place.offset
                     : b.trainable() + place.offset * static_cast<int64_t>(dtype_size(setup_.dtype));
    if (setup_.stream.device == DeviceType::kCpu) return {home, setup_.dtype};
    pieces_.push_back({home, Memory(DeviceType::kCpu, place_bytes(setup_, place))});
    return {pieces_.back().memory.data(), setup_.dtype};
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
  std::vector<OpenBlock> open_;
  std::vector<Piece> pieces_;
};

// Calls read(wanted) for all near blocks at once, in the order of the files, then for each streamed block by
// itself, since these pass through one slot.
void by_home(const LoadSetup& setup, const WeightStore& store,
             const std::function<void(const std::function<bool(size_t)>& wanted)>& read) {
  read([&](size_t block) { return !store.streamed(static_cast<int64_t>(block)); });
  for (size_t b = 0; b < setup.layout.blocks.size(); ++b) {
    if (store.streamed(static_cast<int64_t>(b))) read([b](size_t block) { return block == b; });
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
      initialise(place.parameter, static_cast<uint64_t>(seed), number, setup.dtype,
                 staging.target(block, place).memory);
    }
    staging.finish();
  }
}

}  // namespace

void load_weights(const LoadSetup& setup, const std::string& directory, WeightStore& store) {
  const ModelFiles files(directory);
  by_home(setup, store, [&](const std::function<bool(size_t)>& wanted) {
    Staging staging(setup, store);
    const auto target = [&](size_t block, const TensorPlace& place) {
      return wanted(block) ? staging.target(block, place) : LoadTarget{nullptr, setup.dtype};
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
               [&](size_t block, const TensorPlace& place) { return staging.target(block, place); },
               {.threads = setup.threads, .progress = {}});
  staging.finish();
}

void initialise_adapter(const LoadSetup& setup, int64_t seed, WeightStore& store) {
  initialise_where(setup, seed, store, is_adapter);
}

}  // namespace lm
