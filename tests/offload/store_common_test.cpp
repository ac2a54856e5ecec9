// Arrays in host memory that several processes have in common: one store fills them, another reads them.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "offload/local_store.h"
#include "tests/support/byte_pattern.h"

namespace lm {
namespace {

// Two stores of one memory: the first fills it, as one process does for the others.
struct InCommon {
  explicit InCommon(bool verify = true)
      : whole{.bytes = {20000, 8192, 40960, 1},
              .name = [](int64_t a) { return "array " + std::to_string(a); },
              .slots = 2,
              .verify = verify,
              .slots_on_device = true,
              .in_host = {1, 1, 1, 1}},
        setup(whole) {
    setup.in_common = {1, 0, 1, 1};
    memory.resize(static_cast<size_t>(LocalStore::common_bytes(setup)), std::byte{0x77});
    setup.common = memory;
    LocalStoreSetup other = setup;
    other.fills_common = false;
    pools.emplace_back(DeviceType::kCpu, LocalStore::pinned_bytes(setup));
    pools.emplace_back(DeviceType::kCpu, LocalStore::pinned_bytes(setup));
    filler = std::make_unique<LocalStore>(setup, nullptr, nullptr, pools.front());
    reader = std::make_unique<LocalStore>(other, nullptr, nullptr, pools.back());
  }
  static void write(LocalStore& store, int64_t array, unsigned seed) {
    const int64_t bytes[] = {20000, 8192, 40960, 1};
    store.allocate_slot(array, 0);
    const std::vector<std::byte> made = pattern(bytes[array], seed);
    std::memcpy(store.use(array), made.data(), made.size());
    store.write_back(array);
    store.forget(array);
  }
  void fill() {
    for (const int64_t array : {0, 2, 3}) write(*filler, array, static_cast<unsigned>(array));
    filler->publish_common();
    reader->adopt_common();
  }
  LocalStoreSetup whole, setup;
  std::vector<std::byte> memory;
  std::deque<PinnedPool> pools;
  std::unique_ptr<LocalStore> filler, reader;
};

TEST(Store, WhatOneProcessFillsOthersReadInTheSameMemory) {
  for (const bool verify : {true, false}) {
    InCommon f(verify);
    EXPECT_EQ(LocalStore::pinned_bytes(f.whole) - LocalStore::pinned_bytes(f.setup), 24576 + 40960 + 8192);
    EXPECT_EQ(std::ssize(f.memory), 24576 + 40960 + 8192 + (3 + 5 + 1) * 8);
    f.fill();
    EXPECT_TRUE(f.filler->fills(0) && f.filler->fills(1) && f.reader->fills(1));
    EXPECT_FALSE(f.reader->fills(0));
    for (const int64_t array : {0, 2, 3}) {
      const std::vector<std::byte> want =
          pattern(f.setup.bytes[static_cast<size_t>(array)], static_cast<unsigned>(array));
      for (LocalStore* const store : {f.filler.get(), f.reader.get()}) {
        store->fetch(array, 1);
        EXPECT_TRUE(holds(store->use(array), want)) << array;
        store->forget(array);
        std::vector<std::byte> got(want.size());
        store->read(array, 0, got);
        EXPECT_TRUE(got == want) << array;
      }
      f.reader->reset();  // the others go on reading: it is as it was
    }
    InCommon::write(*f.reader, 1, 9);  // its own
  }
}

TEST(Store, WhatOthersReadIsWrittenByNobody) {
  InCommon f;
  EXPECT_THROW(InCommon::write(*f.reader, 0, 1), Error);
  f.fill();
  EXPECT_THROW(InCommon::write(*f.filler, 0, 1), Error);
  EXPECT_THROW(InCommon::write(*f.reader, 0, 1), Error);
}

// By the checksums of the process that has filled it.
TEST(Store, DamageOfMemoryInCommonIsFoundByEachReader) {
  InCommon f;
  f.fill();
  f.memory[24576 + 8192 + 5] ^= std::byte{1};  // of array 2
  for (LocalStore* const store : {f.filler.get(), f.reader.get()}) {
    store->fetch(2, 0);
    try {
      store->use(2);
      ADD_FAILURE() << "damaged bytes are used";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kIntegrity);
      EXPECT_NE(std::string(error.what()).find("8192 of 40960"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace lm
