// A store that is as simple as its interface allows: arrays in place in plain memory of compute's device,
// every transfer a copy on compute's stream at the moment it is asked for. Nothing of it verifies.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/arena.h"
#include "base/cuda.h"
#include "offload/local_store.h"

namespace lm::offloaded_run {

class MemoryStore : public Store {
 public:
  // What callers did to all stores that count here.
  struct Calls {
    int64_t fetches = 0, claims = 0, writes = 0, uses = 0, polls = 0, flushes = 0;
  };

  MemoryStore(const LocalStoreSetup& setup, Calls& calls) : stream_(setup.stream), calls_(calls) {
    for (const int64_t bytes : setup.bytes) arrays_.emplace_back(stream_.device, bytes);
    const int64_t most = *std::max_element(setup.bytes.begin(), setup.bytes.end());
    for (int64_t s = 0; s < setup.slots; ++s) slots_.emplace_back(stream_.device, most);
  }

  void fetch(int64_t array, int64_t slot) override {
    ++calls_.fetches;
    take(array, slot);
    Array& a = at(array);
    if (a.fresh) {
      a.arrival = Arrival::kZeros;
    } else {
      copy_bytes(memory(array), a.stored.data(), a.bytes, stream_);
    }
  }
  void allocate_slot(int64_t array, int64_t slot) override {
    ++calls_.claims;
    take(array, slot);
  }
  void write_back(int64_t array) override {
    ASSERT_GE(at(array).slot, 0);
    if (!at(array).used) return;
    ++calls_.writes;
    copy_bytes(at(array).stored.data(), memory(array), at(array).bytes, stream_);
    at(array).fresh = false;
  }
  void forget(int64_t array) override { at(array).slot = -1; }
  void poll() override { ++calls_.polls; }
  void flush() override { ++calls_.flushes; }

  std::byte* use(int64_t array) override {
    Arrival arrival = Arrival::kKnown;
    return use_unchecked(array, &arrival);
  }
  std::byte* use_unchecked(int64_t array, Arrival* arrival) override {
    ++calls_.uses;
    Array& a = at(array);
    EXPECT_GE(a.slot, 0) << "array " << array << " is used, and in no slot";
    a.used = true;
    *arrival = std::exchange(a.arrival, Arrival::kKnown);
    if (*arrival == Arrival::kZeros) zero_bytes(memory(array), a.bytes, stream_);
    return memory(array);
  }

  void read(int64_t array, int64_t begin, std::span<std::byte> out) override {
    const std::byte* const from = at(array).slot >= 0 ? memory(array) : at(array).stored.data();
    copy_bytes(out.data(), from + begin, std::ssize(out), stream_);
    synchronize(stream_);
  }
  void reset() override {
    for (Array& a : arrays_) a.slot = -1, a.fresh = true;
  }

  void resize(int64_t array, int64_t bytes) override { at(array).bytes = bytes; }
  bool holds(int64_t array) const override {
    return static_cast<size_t>(array) < arrays_.size() &&
           arrays_[static_cast<size_t>(array)].stored.size() > 0;
  }
  bool in_slot(int64_t array) const override { return arrays_[static_cast<size_t>(array)].slot >= 0; }
  bool fresh(int64_t array) const override { return arrays_[static_cast<size_t>(array)].fresh; }

 private:
  struct Array {
    Array(DeviceType device, int64_t size) : stored(device, size), bytes(size) {}
    Memory stored;
    int64_t bytes;
    int64_t slot = -1;
    bool fresh = true, used = false;
    Arrival arrival = Arrival::kKnown;
  };
  Array& at(int64_t array) { return arrays_[static_cast<size_t>(array)]; }
  std::byte* memory(int64_t array) { return slots_[static_cast<size_t>(at(array).slot)].data(); }
  // The slot becomes the array's.
  void take(int64_t array, int64_t slot) {
    for (Array& other : arrays_) {
      if (other.slot == slot) other.slot = -1;
    }
    at(array).slot = slot;
    at(array).used = false;
    at(array).arrival = Arrival::kKnown;
  }

  StreamView stream_;
  Calls& calls_;
  std::vector<Array> arrays_;
  std::vector<Memory> slots_;
};

}  // namespace lm::offloaded_run
