// The other entry points of the stand-in runtime: devices, streams, events, launches. Loaded before
// libcudart, whose remaining calls (error texts) need no driver and answer themselves.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "state.h"

using namespace emulator;

namespace {

// What ran here must not be taken for what ran on a GPU.
void say_once() {
  static const bool said = [] {
    const char* quiet = std::getenv("EMULATOR_QUIET");
    if (quiet != nullptr && std::strcmp(quiet, "1") == 0) return false;
    return std::fputs(
               "on the emulator: no GPU is here; nvcc's code, flash attention's and cuBLAS's arithmetic "
               "and speed are not what a GPU does\n",
               stderr) >= 0;
  }();
  (void)said;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ---- devices
cudaError_t cudaGetDeviceCount(int* count) {
  say_once();
  *count = static_cast<int>(state().settings.cards.size());
  return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* out) {
  *out = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  const bool there = index >= 0 && index < static_cast<int>(state().settings.cards.size());
  if (!there) return failed(cudaErrorInvalidDevice);
  device = index;
  return ok();
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int index) {
  std::memset(out, 0, sizeof *out);
  if (index < 0 || index >= static_cast<int>(state().settings.cards.size()))
    return failed(cudaErrorInvalidDevice);
  const Card& card = state().settings.cards[static_cast<size_t>(index)];
  std::snprintf(out->name, sizeof out->name, "%s", card.name.c_str());
  std::memcpy(out->uuid.bytes, card.uuid.data(), card.uuid.size());
  out->totalGlobalMem = static_cast<size_t>(card.memory);
  // As an H100 says of itself, but for what its compute capability decides.
  out->major = card.major, out->minor = card.minor, out->multiProcessorCount = 132, out->warpSize = 32;
  out->maxThreadsPerBlock = 1024, out->maxThreadsPerMultiProcessor = 2048,
  out->maxBlocksPerMultiProcessor = 32;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerMultiprocessor = static_cast<size_t>(card.shared_memory());
  out->sharedMemPerBlockOptin = out->sharedMemPerMultiprocessor - (card.major < 8 ? 0 : 1024);
  out->regsPerBlock = out->regsPerMultiprocessor = 65536, out->l2CacheSize = 50 << 20;
  for (int i = 0; i < 3; ++i) {
    out->maxGridSize[i] = i > 0 ? 65535 : 2147483647;
    out->maxThreadsDim[i] = i == 2 ? 64 : 1024;
  }
  out->unifiedAddressing = out->canMapHostMemory = out->concurrentKernels = 1, out->asyncEngineCount = 3;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  cudaDeviceProp p;
  if (const auto e = cudaGetDeviceProperties(&p, index)) return e;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = std::getenv("EMULATOR_NO_HOST_ADDRESS") == nullptr;
      break;
    case cudaDevAttrHostRegisterReadOnlySupported:
      *value = state().settings.read_only;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  return *can = 0, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return synchronize_all(), ok();
}
cudaError_t cudaDriverGetVersion(int* v) {
  return *v = 13000, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  return *v = 13000, cudaSuccess;
}
// LibTorch looks its calls up where memory has run out, to tell who has it, and insists on finding them.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  constexpr int kNotSupported = 801;
  *out = reinterpret_cast<void*>(+[] { return kNotSupported; });
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return ok();
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, static_cast<cudaError_t>(state().sticky.load()));
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}

// ---- streams and events
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int) {
  *out = reinterpret_cast<cudaStream_t>(make_stream((flags & cudaStreamNonBlocking) == 0, device));
  return ok();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Stream* const s = find(handle);
  const std::lock_guard lock(s->mutex);
  s->closing = true;  // what is queued is still done
  s->changed.notify_one();
  return ok();
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream* const s = find(handle);
  for (Stream* other : partners(s)) order_after(s, mark(other));
  host_wait(mark(s));
  return ok();
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const PointPtr point = mark(find(handle));
  point->stream->want(point->number);
  usleep(50);
  if (!point->reached()) return failed(cudaErrorNotReady);
  host_waited(point);
  return ok();
}
static PointPtr point_of(cudaEvent_t event) {
  const std::lock_guard lock(state().mutex);
  return reinterpret_cast<Event*>(event)->point;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  if (const PointPtr point = point_of(event)) order_after(find(handle), point);  // never recorded: no wait
  return ok();
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) {
  enqueue(s, Kind::kOrder, "callback", [=] { f(s, cudaSuccess, data); });
  return ok();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long*,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t*) {
  return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return ok();
}
cudaError_t cudaEventCreate(cudaEvent_t* out) {
  return cudaEventCreateWithFlags(out, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return delete reinterpret_cast<Event*>(event), ok();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const PointPtr point = mark(find(handle));
  const std::lock_guard lock(state().mutex);
  reinterpret_cast<Event*>(event)->point = point;
  return ok();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned) {
  return cudaEventRecord(event, s);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const PointPtr point = point_of(event);
  if (!point) return ok();
  // Who never gave a stream anything only watches: nothing is ordered by that, and nothing hurries for it.
  if (!issues) return point->reached() ? ok() : failed(cudaErrorNotReady);
  point->stream->want(point->number);  // who asks again and again must get there
  if (!point->reached()) return failed(cudaErrorNotReady);
  host_waited(point);
  return ok();
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const PointPtr point = point_of(event)) host_wait(point);
  return ok();
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  const PointPtr a = point_of(from), b = point_of(to);
  if (!a || !b) return failed(cudaErrorInvalidResourceHandle);
  if (!a->reached() || !b->reached()) return failed(cudaErrorNotReady);
  *ms = static_cast<float>(static_cast<double>(b->done_ns - a->done_ns) / 1e6);
  return ok();
}

// ---- launches: ours come through emulator::enqueue; LibTorch's own kernels are not run, and say their name
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
// Apart from the state, whose threads a process that forks before its first call must not have.
static std::unordered_map<const void*, const char*>& kernels() {
  static auto* const all = new std::unordered_map<const void*, const char*>;  // by their host function
  return *all;
}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  kernels().emplace(host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) {
  return *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host)), cudaSuccess;
}
static thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configuration = {grid, block, shared, reinterpret_cast<cudaStream_t>(stream)};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}
static cudaError_t not_emulated(const void* kernel) {
  const auto it = kernels().find(kernel);
  fault(std::string("kernel not emulated: ") + (it == kernels().end() ? "?" : it->second));
  return failed(cudaErrorInvalidDeviceFunction);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return not_emulated(reinterpret_cast<const void*>(kernel));
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return not_emulated(kernel);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return not_emulated(kernel);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  std::memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024, out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t,
                                                                   unsigned) {
  return *out = 2, cudaSuccess;
}

}  // extern "C"
#pragma GCC visibility pop
