// Arrays in host memory that several processes have in common: one fills them, all read them. They lie in the
// order of their numbers, whole chunks each, and behind them their checksums, by which the processes that
// have not filled them verify what arrives on their devices.
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "offload/local_store.h"

namespace lm {
namespace {

int64_t sums_bytes_of(int64_t array_bytes) {
  return ceil_div(array_bytes, kChecksumChunk) * static_cast<int64_t>(sizeof(uint64_t));
}

}  // namespace

int64_t LocalStore::common_bytes(const LocalStoreSetup& setup) {
  int64_t sum = 0;
  for (size_t a = 0; a < setup.in_common.size(); ++a) {
    if (setup.in_common[a] == 0 || setup.bytes[a] == 0) continue;
    LM_CHECK(setup.in_host[a] != 0, setup.name(static_cast<int64_t>(a)) + " in common is not in host memory");
    sum += round_up(setup.bytes[a], kChecksumChunk) + sums_bytes_of(setup.bytes[a]);
  }
  return sum;
}

// Calls body(array, its checksums in common).
template <class Body>
void LocalStore::each_in_common(const Body& body) {
  std::byte* sums = setup_.common.data();
  for (size_t a = 0; a < arrays_.size(); ++a)
    if (in_common(static_cast<int64_t>(a))) sums += round_up(setup_.bytes[a], kChecksumChunk);
  for (size_t a = 0; a < arrays_.size(); ++a) {
    if (!in_common(static_cast<int64_t>(a)) || setup_.bytes[a] == 0) continue;
    body(arrays_[a], sums);
    sums += sums_bytes_of(setup_.bytes[a]);
  }
}

void LocalStore::place_common() {
  const int64_t bytes = common_bytes(setup_);
  if (bytes == 0) return;
  LM_CHECK(std::ssize(setup_.common) >= bytes, "memory in common is too small");
  std::byte* memory = setup_.common.data();
  each_in_common([&](Array& array, std::byte*) {
    array.host_array = memory;
    memory += round_up(array.bytes, kChecksumChunk);
  });
}

void LocalStore::publish_common() {
  if (common_bytes(setup_) == 0 || !setup_.fills_common) return;
  flush();
  each_in_common([&](Array& array, std::byte* sums) {
    LM_CHECK(!array.fresh, "memory in common was not filled");
    if (setup_.verify) std::memcpy(sums, array.sums, static_cast<size_t>(sums_bytes_of(array.bytes)));
  });
  published_ = true;
}

void LocalStore::adopt_common() {
  if (setup_.fills_common) return;
  each_in_common([&](Array& array, const std::byte* sums) {
    array.fresh = false;
    array.left_from = 0;  // it has left none: nothing is waited for
    if (setup_.verify) std::memcpy(array.sums, sums, static_cast<size_t>(sums_bytes_of(array.bytes)));
  });
}

}  // namespace lm
