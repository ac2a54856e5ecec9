#include "weights/loans.h"

#include <exception>
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
  return store_->trainable(block_);
}

std::byte* Loan::frozen() const {
  return store_->frozen(block_);
}

OpenBlock::OpenBlock(WeightStore& store, int64_t block, bool changes)
    : store_(&store), block_(block), changes_(changes) {}

OpenBlock::OpenBlock(OpenBlock&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)),
      block_(other.block_),
      changes_(other.changes_),
      brought_(other.brought_) {}

OpenBlock::~OpenBlock() noexcept(false) {
  if (store_ == nullptr || !brought_) return;
  if (changes_ && std::uncaught_exceptions() == 0) store_->far_->write_back(block_);
  store_->far_->forget(block_);
}

void OpenBlock::bring() const {
  if (!brought_) store_->far_->fetch(block_, 0);
  brought_ = true;
}

std::byte* OpenBlock::trainable() const {
  if (store_->trainable_away(block_)) bring();
  return store_->trainable(block_);
}

std::byte* OpenBlock::frozen() const {
  if (store_->frozen_away(block_)) bring();
  return store_->frozen(block_);
}

WeightStore::WeightStore(const ModelLayout& layout, DType dtype, DeviceType device, Store* far)
    : layout_(layout), dtype_(dtype), far_(far) {
  for (const BlockLayout& block : layout.blocks) {
    const bool away = streamed(static_cast<int64_t>(blocks_.size()));
    const bool base = block.frozen_bytes > 0;
    const int64_t trainable = block.flat_elements * static_cast<int64_t>(dtype_size(dtype));
    blocks_.push_back({Memory(device, away && !base ? 0 : trainable),
                       Memory(device, away && base ? 0 : block.frozen_bytes)});
  }
}

bool WeightStore::frozen_away(int64_t block) const {
  return streamed(block) && layout_.blocks[static_cast<size_t>(block)].frozen_bytes > 0;
}

bool WeightStore::trainable_away(int64_t block) const {
  return streamed(block) && !frozen_away(block);
}

std::byte* WeightStore::trainable(int64_t block) const {
  return trainable_away(block) ? far_->use(block) : blocks_[static_cast<size_t>(block)].trainable.data();
}

std::byte* WeightStore::frozen(int64_t block) const {
  return frozen_away(block) ? far_->use(block) : blocks_[static_cast<size_t>(block)].frozen.data();
}

std::byte* WeightStore::trainable_home(int64_t block) {
  const Block& b = blocks_[static_cast<size_t>(block)];
  LM_CHECK(b.loans == 0, "block " + std::to_string(block) + " is on loan");
  return trainable(block);
}

void WeightStore::visit_state(StateVisitor& visitor) {
  const auto size = static_cast<int64_t>(dtype_size(dtype_));
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const OpenBlock open(*this, static_cast<int64_t>(b), true);
    for (const TensorPlace& place : layout_.blocks[b].tensors) {
      if (place.frozen) continue;
      const Parameter& p = place.parameter;
      const auto shape = p.vector() ? std::vector<int64_t>{p.rows} : std::vector<int64_t>{p.rows, p.columns};
      visitor.tensor("weight." + p.name, dtype_, shape,
                     {open.trainable() + place.offset * size, static_cast<size_t>(p.elements() * size)});
    }
  }
}

}  // namespace lm
