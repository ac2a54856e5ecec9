// What the stand-in runtime promises: missing waits are found by the order checker and show when everything
// is late, memory is what CUDA allows it to be at its worst, and counters count.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "base/cuda.h"
#include "base/error.h"
#include "base/host_address.h"
#include "tests/emulator/child.h"
#include "tests/emulator/emulator.h"

namespace lm {
namespace {

using emulator::in_child;
using ::testing::ExitedWithCode;
constexpr int64_t kFloats = 64, kBytes = kFloats * 4;
constexpr int kRace = 86;

// Host memory that is registered, so that copies with it run beside the host.
struct Pinned {
  explicit Pinned(float value) : values(kFloats, value) { cuda_register_host(values.data(), kBytes); }
  ~Pinned() { cuda_unregister_host(values.data()); }
  std::vector<float> values;
};
struct Device {
  Device() : memory(cuda_allocate(kBytes)) {}
  ~Device() { cuda_free(memory); }
  void* memory;
};

// A copies to the device, B copies back; an event is between them, recorded or not. The first value B saw.
enum class Link { kNone, kEvent, kUnrecordedEvent };
float pass_on(Link link) {
  Pinned in(5), out(1);
  const Device device;
  const Stream a(DeviceType::kCuda), b(DeviceType::kCuda);
  zero_bytes(device.memory, kBytes, b.view());
  b.synchronize();
  copy_bytes(device.memory, in.values.data(), kBytes, a.view());
  Event event(DeviceType::kCuda);
  if (link == Link::kEvent) event.record(a.view());
  if (link != Link::kNone) event.wait(b.view());
  copy_bytes(out.values.data(), device.memory, kBytes, b.view());
  b.synchronize();
  const float seen = out.values[0];
  a.synchronize();
  return seen;
}
int passed_on(Link link) {
  return static_cast<int>(pass_on(link));
}

TEST(EmulatorDeathTest, AMissingWaitIsFoundByTheOrderChecker) {
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [] { return passed_on(Link::kEvent); }), ExitedWithCode(5), "");
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [] { return passed_on(Link::kNone); }), ExitedWithCode(kRace),
              "RACE: .*copy device to pinned");
}

TEST(EmulatorDeathTest, AMissingWaitShowsOldBytesWhenAllIsLate) {
  EXPECT_EXIT(in_child("EMULATOR_LAZY=1", [] { return passed_on(Link::kEvent); }), ExitedWithCode(5), "");
  EXPECT_EXIT(in_child("EMULATOR_LAZY=1", [] { return passed_on(Link::kNone); }), ExitedWithCode(0), "");
}

TEST(EmulatorDeathTest, AnEventThatWasNeverRecordedIsNotWaitedFor) {
  EXPECT_EXIT(in_child("EMULATOR_LAZY=1", [] { return passed_on(Link::kUnrecordedEvent); }),
              ExitedWithCode(0), "");
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [] { return passed_on(Link::kUnrecordedEvent); }),
              ExitedWithCode(kRace), "RACE");
}

// A thread asks whether the copy to the device is over, and then this one copies back. Who asks has given a
// stream something before, or only watches.
int passed_on_after_a_look(bool issues) {
  Pinned in(5), out(1);
  const Device device;
  const Stream a(DeviceType::kCuda), b(DeviceType::kCuda);
  copy_bytes(device.memory, in.values.data(), kBytes, a.view());
  Event event(DeviceType::kCuda), other(DeviceType::kCuda);
  event.record(a.view());
  std::thread([&] {
    if (issues) other.record(a.view());
    while (!event.done()) std::this_thread::yield();
  }).join();
  copy_bytes(out.values.data(), device.memory, kBytes, b.view());
  b.synchronize();
  return static_cast<int>(out.values[0]);
}

TEST(EmulatorDeathTest, WhoOnlyWatchesOrdersNothing) {
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [] { return passed_on_after_a_look(true); }), ExitedWithCode(5),
              "");
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [] { return passed_on_after_a_look(false); }),
              ExitedWithCode(kRace), "RACE");
}

// The null stream fills, another stream copies back.
int fill_and_read(unsigned flags) {
  Pinned out(1);
  const Device device;
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, flags);
  cudaMemsetAsync(device.memory, 0, kBytes, nullptr);
  cudaMemcpyAsync(out.values.data(), device.memory, kBytes, cudaMemcpyDefault, stream);
  cudaStreamSynchronize(stream);
  cudaDeviceSynchronize();
  return static_cast<int>(out.values[0]);
}

TEST(EmulatorDeathTest, TheNullStreamIsOrderedWithBlockingStreamsAlone) {
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [] { return fill_and_read(cudaStreamDefault); }),
              ExitedWithCode(0), "");
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [] { return fill_and_read(cudaStreamNonBlocking); }),
              ExitedWithCode(kRace), "RACE");
}

TEST(EmulatorDeathTest, AHostThreadThatFollowsADevicePointerEnds) {
  const auto look = [](bool freed) {
    void* const p = cuda_allocate(kBytes);
    if (freed) cuda_free(p);
    return *static_cast<volatile int*>(p);
  };
  EXPECT_DEATH(in_child("", [&] { return look(false); }), "the HOST dereferenced the DEVICE address");
  EXPECT_DEATH(in_child("", [&] { return look(true); }), "the HOST dereferenced the DEVICE address");
}

TEST(EmulatorDeathTest, WorkInAStreamThatFollowsAFreedPointerEnds) {
  EXPECT_DEATH(in_child("",
                        [] {
                          void* const p = cuda_allocate(kBytes);
                          cuda_free(p);
                          emulator::enqueue(nullptr, emulator::Kind::kAten, "look",
                                            [p] { *static_cast<volatile int*>(emulator::inside(p)) = 1; });
                          return static_cast<int>(cudaDeviceSynchronize());
                        }),
               "look dereferenced");
}

TEST(EmulatorDeathTest, FreeingMemoryWaitsForStreamsThatWereDestroyed) {
  const auto leave_and_free = [] {
    void* const p = cuda_allocate(kBytes);
    {
      const Stream stream(DeviceType::kCuda);
      emulator::enqueue(stream.view().handle, emulator::Kind::kAten, "late", [p] {
        usleep(20000);
        *static_cast<volatile int*>(emulator::inside(p)) = 1;
      });
    }
    cuda_free(p);
    usleep(60000);  // so that work which is still there meets freed memory
    return static_cast<int>(cudaDeviceSynchronize());
  };
  EXPECT_EXIT(in_child("", leave_and_free), ExitedWithCode(0), "");
  EXPECT_EXIT(in_child("EMULATOR_LAZY=1", leave_and_free), ExitedWithCode(0), "");
}

TEST(EmulatorDeathTest, BytesBesideAnAllocationAreLookedAtWhenItIsFreed) {
  const auto write_at = [](int64_t at) {
    void* const p = cuda_allocate(kBytes + 1);
    emulator::enqueue(nullptr, emulator::Kind::kAten, "write",
                      [=] { static_cast<char*>(emulator::inside(p))[at] = 0; });
    cuda_free(p);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
  };
  EXPECT_EXIT(in_child("", [&] { return write_at(kBytes); }), ExitedWithCode(0), "");
  EXPECT_EXIT(in_child("", [&] { return write_at(kBytes + 1); }), ExitedWithCode(1),
              "1 bytes behind an allocation of 257 bytes were written");
  EXPECT_EXIT(in_child("", [&] { return write_at(-1); }), ExitedWithCode(1),
              "1 bytes before an allocation of 257 bytes were written");
}

// The source changes when the copy is enqueued, before anybody waits.
int copy_and_change() {
  std::vector<float> pageable(kFloats, 1);
  Pinned out(0);
  const Device device;
  const Stream stream(DeviceType::kCuda);
  copy_bytes(device.memory, pageable.data(), kBytes, stream.view());
  pageable.assign(kFloats, 2);
  copy_bytes(out.values.data(), device.memory, kBytes, stream.view());
  stream.synchronize();
  return static_cast<int>(out.values[0]);
}

TEST(EmulatorDeathTest, CopiesWithPageableMemoryAreLateUnlessTheyAreToWait) {
  EXPECT_EXIT(in_child("EMULATOR_LAZY=1", copy_and_change), ExitedWithCode(2), "");
  EXPECT_EXIT(in_child("EMULATOR_LAZY=1 EMULATOR_PAGEABLE=waits", copy_and_change), ExitedWithCode(1), "");
}

TEST(Emulator, FreshMemoryIsNotANumber) {
  const Device device;
  Pinned out(0);
  const Stream stream(DeviceType::kCuda);
  copy_bytes(out.values.data(), device.memory, kBytes, stream.view());
  stream.synchronize();
  for (const float value : out.values) EXPECT_TRUE(std::isnan(value));
}

TEST(Emulator, CopiesBeyondAnAllocationOrARegisteredBlockAreRefused) {
  const Device device;
  std::vector<float> host(2 * kFloats);
  ASSERT_TRUE(cuda_register_host(host.data(), kBytes));
  const Stream stream(DeviceType::kCuda);
  auto* const handle = static_cast<cudaStream_t>(stream.view().handle);
  const auto copy = [&](int64_t at, int64_t bytes) {
    return cudaMemcpyAsync(static_cast<char*>(device.memory) + at, host.data(), static_cast<size_t>(bytes),
                           cudaMemcpyDefault, handle);
  };
  EXPECT_EQ(copy(0, kBytes), cudaSuccess);
  EXPECT_EQ(copy(4, kBytes), cudaErrorInvalidValue);  // 4 bytes more than there are
  EXPECT_EQ(copy(-4, 4), cudaErrorInvalidValue);
  EXPECT_EQ(copy(0, kBytes + 4), cudaErrorInvalidValue);
  cudaGetLastError();
  stream.synchronize();
  cuda_unregister_host(host.data());
}

// A page that this process may read alone, as it has of memory that another one fills.
struct ReadOnly {
  void* memory = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ~ReadOnly() { munmap(memory, 4096); }
};

TEST(Emulator, MemoryThatIsRegisteredAsReadOnlyIsOnlyRead) {
  const Device device;
  const ReadOnly host;
  EXPECT_FALSE(cuda_register_host(host.memory, 4096));  // the driver might write to it
  std::string reason;
  ASSERT_TRUE(cuda_registers_read_only() && cuda_register_read_only(host.memory, 4096, &reason)) << reason;
  const Stream stream(DeviceType::kCuda);
  auto* const handle = static_cast<cudaStream_t>(stream.view().handle);
  EXPECT_EQ(cudaMemcpyAsync(device.memory, host.memory, kBytes, cudaMemcpyDefault, handle), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(host.memory, device.memory, kBytes, cudaMemcpyDefault, handle),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(host.memory, 0, kBytes, handle), cudaErrorInvalidValue);
  cudaGetLastError();
  stream.synchronize();
  cuda_unregister_host(host.memory);
}

TEST(EmulatorDeathTest, ReadOnlyMemoryIsRefusedWhereTheSettingSaysSo) {
  const auto tries = [] {
    const ReadOnly host;
    std::string reason;
    return cuda_registers_read_only() || cuda_register_read_only(host.memory, 4096, &reason) ? 1 : 0;
  };
  EXPECT_EXIT(in_child("EMULATOR_NO_READ_ONLY=1", tries), ExitedWithCode(0), "");
}

TEST(EmulatorDeathTest, MemoryIsUnregisteredBeforeItIsUnmapped) {
  const auto late = [] {
    void* const memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!cuda_register_host(memory, 4096)) return 1;
    munmap(memory, 4096);
    cuda_unregister_host(memory);
    return cudaDeviceSynchronize() == cudaSuccess ? 2 : 0;
  };
  EXPECT_EXIT(in_child("", late), ExitedWithCode(0), "unmapped before it is unregistered");
}

TEST(Emulator, CountersCount) {
  Pinned pinned(0);
  std::vector<float> pageable(kFloats);
  const Stream stream(DeviceType::kCuda);
  emulator::reset_counters();
  {
    const Device device;
    copy_bytes(device.memory, pinned.values.data(), kBytes, stream.view());
    copy_bytes(device.memory, pageable.data(), kBytes, stream.view());
    copy_bytes(pinned.values.data(), device.memory, 8, stream.view());
    stream.synchronize();
    const emulator::Counters c = emulator::counters();
    EXPECT_EQ(c.bytes_to_device, 2 * kBytes);
    EXPECT_EQ(c.bytes_to_host, 8);
    EXPECT_EQ(c.pageable_copies, 1);
    EXPECT_GE(c.host_waits, 1);
    EXPECT_EQ(c.allocations, 1);
    EXPECT_EQ(c.by_name.at("copy pinned to device").times, 1);
    EXPECT_EQ(c.launches + c.gemms + c.aten_operations + c.registrations, 0);
  }
  EXPECT_EQ(emulator::counters().allocations, 2);
}

}  // namespace
}  // namespace lm
