// libcuda as LibTorch's lazily loaded NVRTC stub wants it: it must resolve, and one context is active.
extern "C" {
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, 0;
}
int cuGetErrorString(int, const char** text) {
  return *text = "the emulator has no driver", 0;
}
int cuCtxGetCurrent(void** context) {
  return *context = &context, 0;
}
#define NONE(name) \
  int name() {     \
    return 801;    \
  }  // CUDA_ERROR_NOT_SUPPORTED
NONE(cuCtxSetCurrent);
NONE(cuDeviceGet);
NONE(cuDeviceGetAttribute);
NONE(cuDevicePrimaryCtxRetain);
NONE(cuFuncGetAttribute);
NONE(cuFuncSetAttribute);
NONE(cuFuncSetCacheConfig);
NONE(cuLaunchCooperativeKernel);
NONE(cuLaunchKernel);
NONE(cuLinkAddData_v2);
NONE(cuLinkComplete);
NONE(cuLinkCreate_v2);
NONE(cuModuleGetFunction);
NONE(cuModuleLoad);
NONE(cuModuleLoadData);
NONE(cuModuleLoadDataEx);
NONE(cuModuleUnload);
NONE(cuOccupancyMaxActiveBlocksPerMultiprocessor);
NONE(cuPointerGetAttribute);
NONE(cuTensorMapEncodeTiled);
}
