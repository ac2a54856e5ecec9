// The executables without CUDA: streams and events are no-ops, copies are synchronous.
#include <cstring>

#include "base/cuda.h"
#include "base/error.h"
#include "base/host_address.h"

namespace lm {
namespace {

[[noreturn]] void refuse() {
  throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                  .what = "this executable has no CUDA code",
                                  .place = "",
                                  .next = "run lmlaunch without --gpus, or build with CUDA"});
}

}  // namespace

Stream::Stream(DeviceType device, int threads) : view_{device, nullptr, threads} {
  if (device != DeviceType::kCpu) refuse();
}
Stream::~Stream() = default;
void Stream::synchronize() const {}
void synchronize(StreamView) {}

Event::Event(DeviceType device) : device_(device) {
  if (device != DeviceType::kCpu) refuse();
}
Event::~Event() = default;
void Event::record(StreamView) {}
void Event::wait(StreamView) const {}
void Event::synchronize() const {}
bool Event::done() const {
  return true;
}

TimingEvent::TimingEvent(DeviceType device) {
  if (device != DeviceType::kCpu) refuse();
}
TimingEvent::~TimingEvent() = default;
void TimingEvent::record(StreamView) {}
void TimingEvent::synchronize() const {}
bool TimingEvent::done() const {
  return true;
}
double TimingEvent::seconds_since(const TimingEvent&) const {
  return 0;
}

bool cuda_built() {
  return false;
}
int cuda_device_count(std::string* reason) {
  if (reason != nullptr) *reason = "this executable has no CUDA code";
  return 0;
}
GpuInfo cuda_device(int) {
  refuse();
}
void cuda_select(int) {
  refuse();
}
int cuda_selected() {
  refuse();
}
void* cuda_allocate(int64_t) {
  refuse();
}
void cuda_free(void*) noexcept {}
int64_t cuda_allocated_bytes() {
  return 0;
}
bool cuda_register_host(void*, int64_t, std::string* reason) {
  if (reason != nullptr) *reason = "this executable has no CUDA code";
  return false;
}
bool cuda_register_read_only(void* memory, int64_t bytes, std::string* reason) {
  return cuda_register_host(memory, bytes, reason);
}
bool cuda_registers_read_only() {
  return false;
}
void cuda_unregister_host(void*) noexcept {}
bool cuda_uses_host_addresses() {
  return false;
}
void copy_bytes(void* to, const void* from, int64_t bytes, StreamView) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}
void zero_bytes(void* memory, int64_t bytes, StreamView) {
  std::memset(memory, 0, static_cast<size_t>(bytes));
}

}  // namespace lm
