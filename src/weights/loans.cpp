#include "weights/loans.h"

#include <utility>

#include "base/error.h"

namespace lm {

Loan::Loan(WeightStore& store, int64_t block)
    : store_(&store), block_(block), version_(store.blocks_[static_cast<size_t>(block)].version) {
  ++store.blocks_[static_cast<size_t>(block)].loans;
}

Loan::Loan(Loan&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)), block_(other.block_), version_(other.version_) {}

Loan::~Loan() {
  if (store_ != nullptr) --store_->blocks_[static_cast<size_t>(block_)].loans;
}

std::byte* Loan::trainable() const {
  const auto& block = store_->blocks_[static_cast<size_t>(block_)];
  LM_CHECK(block.version == version_, "a loan of block " + std::to_string(block_) + " outlived an update");
  return block.trainable.data();
}

std::byte* Loan::frozen() const {
  return store_->blocks_[static_cast<size_t>(block_)].frozen.data();
}

WeightStore::WeightStore(const ModelLayout& layout, DType dtype, DeviceType device)
    : layout_(layout), dtype_(dtype) {
  for (const BlockLayout& block : layout.blocks) {
    blocks_.push_back({Memory(device, block.flat_elements * static_cast<int64_t>(dtype_size(dtype))),
                       Memory(device, block.frozen_bytes)});
  }
}

std::byte* WeightStore::trainable_home(int64_t block) {
  Block& b = blocks_[static_cast<size_t>(block)];
  LM_CHECK(b.loans == 0, "block " + std::to_string(block) + " is on loan");
  return b.trainable.data();
}

std::byte* WeightStore::frozen_home(int64_t block) {
  return blocks_[static_cast<size_t>(block)].frozen.data();
}

void WeightStore::visit_state(StateVisitor& visitor) {
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  for (size_t b = 0; b < blocks_.size(); ++b) {
    for (const TensorPlace& place : layout_.blocks[b].tensors) {
      if (place.frozen) continue;
      const Parameter& p = place.parameter;
      const auto shape = p.vector() ? std::vector<int64_t>{p.rows} : std::vector<int64_t>{p.rows, p.columns};
      visitor.tensor(
          "weight." + p.name, dtype_, shape,
          {blocks_[b].trainable.data() + place.offset * size, static_cast<size_t>(p.elements() * size)});
    }
  }
}

}  // namespace lm
