#include "fibers.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace lm::test {
namespace {

constexpr size_t kStack = 256 << 10;  // pages that nobody touches cost nothing

// As the C++ ABI for Itanium defines it.
struct ExceptionState {
  void* caught;
  unsigned uncaught;
};
ExceptionState& exception_state() {
  return *reinterpret_cast<ExceptionState*>(abi::__cxa_get_globals());
}

}  // namespace

Fibers::Owner& Fibers::owner_of(int owner) {
  const auto index = static_cast<size_t>(owner + 1);
  if (index >= owners_.size()) owners_.resize(index + 1);
  return owners_[index];
}

void Fibers::start(int owner, std::function<void()> work) {
  Fiber& fiber = *fibers_.emplace_back(std::make_unique<Fiber>());
  fiber.owner = owner;
  fiber.work = std::move(work);
  fiber.stack = std::make_unique_for_overwrite<std::byte[]>(kStack);
  owner_of(owner);
  next_.push({now_, ++wakes_, &fiber});
}

bool Fibers::run(double until) {
  while (!next_.empty()) {
    const Wake wake = next_.top();
    if (wake.time > until) return false;
    next_.pop();
    const Owner& owner = owner_of(wake.fiber->owner);
    if (owner.stopped) continue;
    if (owner.frozen_until > wake.time) {
      next_.push({owner.frozen_until, wake.number, wake.fiber});
      continue;
    }
    now_ = std::max(now_, wake.time);
    switch_to(*wake.fiber);
  }
  return true;
}

// makecontext passes ints alone.
void Fibers::enter(unsigned high, unsigned low) {
  auto* const self = reinterpret_cast<Fibers*>(uint64_t{high} << 32 | low);
  self->running_->work();
  self->running_->ended = true;
  self->back();
}

void Fibers::switch_to(Fiber& fiber) {
  running_ = &fiber;
  if (fiber.context.uc_stack.ss_sp == nullptr) {
    getcontext(&fiber.context);
    fiber.context.uc_stack = {.ss_sp = fiber.stack.get(), .ss_flags = 0, .ss_size = kStack};
    fiber.context.uc_link = nullptr;
    const auto self = reinterpret_cast<uint64_t>(this);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
  }
  ExceptionState& state = exception_state();
  const ExceptionState mine = std::exchange(state, {fiber.caught, fiber.uncaught});
  swapcontext(&caller_, &fiber.context);
  fiber.caught = state.caught;
  fiber.uncaught = state.uncaught;
  state = mine;
  running_ = nullptr;
  if (!fiber.ended) return;
  fiber.work = nullptr;
  fiber.stack.reset();
}

void Fibers::back() {
  swapcontext(&running_->context, &caller_);
}

void Fibers::nap(double seconds) {
  if (running_ == nullptr) return;
  next_.push({now_ + seconds, ++wakes_, running_});
  back();
}

void Fibers::stop(int owner) {
  owner_of(owner).stopped = true;
  if (running_ != nullptr && running_->owner == owner) back();
}

void Fibers::freeze(int owner, double until) {
  double& frozen = owner_of(owner).frozen_until;
  frozen = std::max(frozen, until);
}

}  // namespace lm::test
