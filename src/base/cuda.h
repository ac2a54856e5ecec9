// Devices, streams, events and copies as small move-only types. `cuda.cpp` implements them with the CUDA
// runtime, `no_cuda.cpp` for executables without it; a program links one of the two. On the CPU a stream does
// its work at once and an event is always complete, so the same code runs on both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"

namespace lm {

// Borrowed handle of a stream, passed last, by value. The CPU's stream works at once, on `threads` threads
// (the calling one included); its handle is null.
struct StreamView {
  DeviceType device = DeviceType::kCpu;
  void* handle = nullptr;  // cudaStream_t
  int threads = 1;
};

// Owns a non-blocking stream of the current device; on the CPU, nothing.
class Stream {
 public:
  explicit Stream(DeviceType device, int threads = 1);
  ~Stream();
  Stream(Stream&& other) noexcept : view_(other.view_) { other.view_.handle = nullptr; }
  Stream& operator=(Stream&&) = delete;
  StreamView view() const { return view_; }
  // Blocks the caller until everything enqueued so far is done.
  void synchronize() const;

 private:
  StreamView view_;
};

// Blocks the calling host thread until everything enqueued so far is done; on the CPU it is already.
void synchronize(StreamView stream);

// Marks a point in a stream. Any thread may wait; recording belongs to the stream's issuing thread.
class Event {
 public:
  explicit Event(DeviceType device);
  ~Event();
  Event(Event&& other) noexcept : device_(other.device_), handle_(other.handle_) { other.handle_ = nullptr; }
  Event& operator=(Event&&) = delete;
  void record(StreamView stream);
  // Work enqueued in `stream` after this call starts only after the recorded point.
  void wait(StreamView stream) const;
  // Blocks the calling host thread.
  void synchronize() const;
  // Whether the recorded point has been passed; never blocks.
  bool done() const;

 private:
  DeviceType device_;
  void* handle_ = nullptr;  // cudaEvent_t
};

// An event whose time can be read, at the cost of timing. A no-op on the CPU: host clocks are right there.
class TimingEvent {
 public:
  explicit TimingEvent(DeviceType device);
  ~TimingEvent();
  TimingEvent(const TimingEvent&) = delete;
  TimingEvent& operator=(const TimingEvent&) = delete;
  void record(StreamView stream);
  void synchronize() const;
  bool done() const;
  // Both points have been passed. 0 on the CPU.
  double seconds_since(const TimingEvent& earlier) const;

 private:
  void* handle_ = nullptr;  // cudaEvent_t
};

// The properties of one GPU that the survey needs.
struct GpuInfo {
  std::string name, uuid;    // uuid: "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", as NVML writes it
  int major = 0, minor = 0;  // compute capability
  int64_t total_bytes = 0, free_bytes = 0;
};

// True in executables that carry CUDA code, whether or not a device is present.
bool cuda_built();
// 0 without a driver or a device; `reason` (may be null) then gives the reason.
int cuda_device_count(std::string* reason = nullptr);
// Also selects it and creates its context: `free_bytes` is measured after that.
GpuInfo cuda_device(int index);
void cuda_select(int index);
int cuda_selected();  // by the calling thread; per thread

// Device memory, one allocation per call; throws Error(30) with the requested and the free bytes.
void* cuda_allocate(int64_t bytes);
void cuda_free(void* memory) noexcept;
// Bytes that this process has allocated on all devices and not freed; LibTorch's allocator counts its own.
int64_t cuda_allocated_bytes();
// Locks host memory for the devices, so that copies run at the link's speed and overlap with computation, and
// kernels may use it in place, by the same address. Once per block, as it is slow. False if CUDA refuses it;
// `reason` (may be null) then gives the reason.
bool cuda_register_host(void* memory, int64_t bytes, std::string* reason = nullptr);
void cuda_unregister_host(void* memory) noexcept;
// Copies in stream order; `to` and `from` may be host or device memory. On the CPU: memcpy.
void copy_bytes(void* to, const void* from, int64_t bytes, StreamView stream);
void zero_bytes(void* memory, int64_t bytes, StreamView stream);

}  // namespace lm
