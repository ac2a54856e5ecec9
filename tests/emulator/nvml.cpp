// libnvidia-ml.so.1 of the emulator: NVML as far as the CLI process and the rank ask it. It lists the cards
// last first, since NVML promises no order.
#include <cstddef>
#include <cstdio>

#include "tests/emulator/settings.h"

namespace {

constexpr int kSuccess = 0, kUninitialized = 1, kInvalidArgument = 2, kNotSupported = 3, kDriverNotLoaded = 9,
              kGpuIsLost = 15;

struct Memory {
  unsigned long long total, free, used;
};
struct Pci {
  char legacy_bus_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

bool ready = false;

unsigned count() {
  return emulator::nvml_state() == "empty" ? 0 : static_cast<unsigned>(emulator::cards().size());
}

// A handle is the card's place in PCI order, plus one.
size_t place_of(void* device) {
  return reinterpret_cast<size_t>(device) - 1;
}
const emulator::Card& card_of(void* device) {
  return emulator::cards().at(place_of(device));
}

int write(const std::string& text, char* to, unsigned size) {
  return std::snprintf(to, size, "%s", text.c_str()), kSuccess;
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  ready = emulator::nvml_state() != "absent";
  return ready ? kSuccess : kDriverNotLoaded;
}
const char* nvmlErrorString(int status) {
  return status == kDriverNotLoaded ? "Driver Not Loaded" : "another error of the emulator's";
}
int nvmlShutdown() {
  ready = false;
  return kSuccess;
}
int nvmlDeviceGetCount_v2(unsigned* number) {
  if (!ready) return kUninitialized;
  *number = count();
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (!ready) return kUninitialized;
  if (index >= count()) return kInvalidArgument;
  if (emulator::lost(count() - index - 1)) return kGpuIsLost;
  *device = reinterpret_cast<void*>(static_cast<size_t>(count() - index));
  return kSuccess;
}
int nvmlDeviceGetName(void* device, char* name, unsigned size) {
  return write(card_of(device).name, name, size);
}
int nvmlDeviceGetUUID(void* device, char* uuid, unsigned size) {
  return write(card_of(device).uuid_text(), uuid, size);
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = memory->free = static_cast<unsigned long long>(card_of(device).memory);
  memory->used = 0;
  return kSuccess;
}
int nvmlDeviceGetPciInfo_v3(void* device, Pci* pci) {
  *pci = {};
  pci->bus = static_cast<unsigned>(0x10 + place_of(device));
  std::snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", 0u, pci->bus, 0u);
  return kSuccess;
}
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = card_of(device).major, *minor = card_of(device).minor;
  return kSuccess;
}
int nvmlDeviceGetUtilizationRates(void*, unsigned* percent) {  // of the cores, and of memory
  percent[0] = 87, percent[1] = 40;
  return kSuccess;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 312500;
  return kSuccess;
}
int nvmlDeviceGetClockInfo(void*, int clock, unsigned* megahertz) {
  *megahertz = 1755;
  return clock == 1 ? kSuccess : kInvalidArgument;
}
int nvmlDeviceGetTemperature(void*, int sensor, unsigned* degrees) {
  *degrees = 64;
  return sensor == 0 ? kSuccess : kInvalidArgument;
}
// LibTorch asks these where memory has run out, to tell who has it.
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = reinterpret_cast<void*>(size_t{1});
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* number, void*) {
  *number = 0;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, unsigned*) {
  return kNotSupported;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, Pci*) {
  return kNotSupported;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}
}
