// The CUDA runtime behind base/cuda.h.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include "base/bytes.h"
#include "base/check_cuda.h"
#include "base/cuda.h"
#include "base/host_address.h"

namespace lm {
namespace {

cudaStream_t stream_of(StreamView view) {
  return static_cast<cudaStream_t>(view.handle);
}

std::string uuid_text(const cudaUUID_t& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const auto byte = static_cast<unsigned char>(uuid.bytes[i]);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

bool passed(cudaEvent_t event) {
  const cudaError_t state = cudaEventQuery(event);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // cudaErrorNotReady must not surface as the error of a later launch
    return false;
  }
  LM_CUDA(state);
  return true;
}

// Memory of cuda_allocate that cuda_free has not released. Device memory is per process, and so is this
// count.
class Allocations {
 public:
  void add(void* memory, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    sizes_[memory] = bytes;
    bytes_ += bytes;
  }
  void remove(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto it = sizes_.find(memory);
    if (it == sizes_.end()) return;
    bytes_ -= it->second;
    sizes_.erase(it);
  }
  int64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<void*, int64_t> sizes_;
  int64_t bytes_ = 0;
};

bool registered(void* memory, int64_t bytes, unsigned flags, std::string* reason) {
  flags |= cudaHostRegisterPortable | cudaHostRegisterMapped;
  const cudaError_t status = cudaHostRegister(memory, static_cast<size_t>(bytes), flags);
  if (status == cudaSuccess) return true;
  cudaGetLastError();  // a refusal must not surface in a later call
  if (reason != nullptr) *reason = cudaGetErrorString(status);
  return false;
}

Allocations& allocations() {
  static auto* const all = new Allocations;  // memory may be freed at the very end
  return *all;
}

}  // namespace

void check_cuda(const char* expression, int status, const char* file, int line) {
  if (status == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(status);
  const char* name = std::strrchr(file, '/');
  throw Error(
      error == cudaErrorMemoryAllocation ? Exit::kDeviceMemory : Exit::kInternal,
      {.area = error == cudaErrorMemoryAllocation ? "MEM-15" : "GPU-34",
       .what = std::string(expression) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error),
       .place = fmt::format("{}:{}", name ? name + 1 : file, line),
       .next = "run lmlaunch doctor"});
}

Stream::Stream(DeviceType device, int threads) : view_{device, nullptr, threads} {
  if (device == DeviceType::kCpu) return;
  cudaStream_t stream = nullptr;
  LM_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  view_.handle = stream;
}
Stream::~Stream() {
  if (view_.handle != nullptr) cudaStreamDestroy(stream_of(view_));
}
void Stream::synchronize() const {
  lm::synchronize(view_);
}

void synchronize(StreamView stream) {
  if (stream.device == DeviceType::kCuda) LM_CUDA(cudaStreamSynchronize(stream_of(stream)));
}

Event::Event(DeviceType device) : device_(device) {
  if (device == DeviceType::kCpu) return;
  cudaEvent_t event = nullptr;
  LM_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  handle_ = event;
}
Event::~Event() {
  if (handle_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(handle_));
}
void Event::record(StreamView stream) {
  if (device_ == DeviceType::kCuda)
    LM_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(handle_), stream_of(stream)));
}
void Event::wait(StreamView stream) const {
  if (device_ == DeviceType::kCuda) {
    LM_CUDA(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(handle_), 0));
  }
}
void Event::synchronize() const {
  if (device_ == DeviceType::kCuda) LM_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(handle_)));
}

bool Event::done() const {
  return device_ != DeviceType::kCuda || passed(static_cast<cudaEvent_t>(handle_));
}

TimingEvent::TimingEvent(DeviceType device) {
  if (device == DeviceType::kCpu) return;
  cudaEvent_t event = nullptr;
  LM_CUDA(cudaEventCreateWithFlags(&event, cudaEventDefault));
  handle_ = event;
}
TimingEvent::~TimingEvent() {
  if (handle_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(handle_));
}
void TimingEvent::record(StreamView stream) {
  if (handle_ != nullptr) LM_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(handle_), stream_of(stream)));
}
void TimingEvent::synchronize() const {
  if (handle_ != nullptr) LM_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(handle_)));
}
bool TimingEvent::done() const {
  return handle_ == nullptr || passed(static_cast<cudaEvent_t>(handle_));
}
double TimingEvent::seconds_since(const TimingEvent& earlier) const {
  if (handle_ == nullptr) return 0;
  float ms = 0;
  LM_CUDA(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(earlier.handle_),
                               static_cast<cudaEvent_t>(handle_)));
  return static_cast<double>(ms) / 1e3;
}

bool cuda_built() {
  return true;
}

int cuda_device_count(std::string* reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return count;
  cudaGetLastError();  // the failed query must not surface in a later call
  if (reason != nullptr) *reason = cudaGetErrorString(status);
  return 0;
}

GpuInfo cuda_device(int index) {
  cudaDeviceProp properties{};
  LM_CUDA(cudaGetDeviceProperties(&properties, index));
  LM_CUDA(cudaSetDevice(index));
  size_t free_bytes = 0, total_bytes = 0;
  LM_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {.name = properties.name,
          .uuid = uuid_text(properties.uuid),
          .major = properties.major,
          .minor = properties.minor,
          .total_bytes = static_cast<int64_t>(total_bytes),
          .free_bytes = static_cast<int64_t>(free_bytes)};
}

void cuda_select(int index) {
  LM_CUDA(cudaSetDevice(index));
}

int cuda_selected() {
  int index = 0;
  LM_CUDA(cudaGetDevice(&index));
  return index;
}

void* cuda_allocate(int64_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) == cudaSuccess) {
    allocations().add(memory, bytes);
    return memory;
  }
  cudaGetLastError();
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  throw Error(Exit::kDeviceMemory, {.area = "MEM-15",
                                    .what = "GPU memory: asked for " + format_bytes(bytes) + ", " +
                                            format_bytes(static_cast<int64_t>(free_bytes)) + " free",
                                    .place = "",
                                    .next = "lower train.micro_batch, or set train.recompute = \"block\""});
}
void cuda_free(void* memory) noexcept {
  allocations().remove(memory);
  cudaFree(memory);
}
int64_t cuda_allocated_bytes() {
  return allocations().bytes();
}

bool cuda_register_host(void* memory, int64_t bytes, std::string* reason) {
  return registered(memory, bytes, 0, reason);
}
bool cuda_register_read_only(void* memory, int64_t bytes, std::string* reason) {
  return registered(memory, bytes, cudaHostRegisterReadOnly, reason);
}
bool cuda_registers_read_only() {
  int can = 0;
  LM_CUDA(cudaDeviceGetAttribute(&can, cudaDevAttrHostRegisterReadOnlySupported, cuda_selected()));
  return can != 0;
}
void cuda_unregister_host(void* memory) noexcept {
  cudaHostUnregister(memory);
}
bool cuda_uses_host_addresses() {
  int can = 0;
  LM_CUDA(cudaDeviceGetAttribute(&can, cudaDevAttrCanUseHostPointerForRegisteredMem, cuda_selected()));
  return can != 0;
}

void copy_bytes(void* to, const void* from, int64_t bytes, StreamView stream) {
  if (stream.device == DeviceType::kCpu) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  LM_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_of(stream)));
}
void zero_bytes(void* memory, int64_t bytes, StreamView stream) {
  if (stream.device == DeviceType::kCpu) {
    std::memset(memory, 0, static_cast<size_t>(bytes));
    return;
  }
  LM_CUDA(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream_of(stream)));
  // The null stream is not ordered with our non-blocking streams: wait, so that no caller uses the memory too
  // early.
  if (stream.handle == nullptr) LM_CUDA(cudaStreamSynchronize(nullptr));
}

}  // namespace lm
