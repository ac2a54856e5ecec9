#include <dlfcn.h>
#include <fmt/format.h>

#include "base/error.h"
#include "comm/nccl_api.h"

namespace lm {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";

void* library() {
  static void* const loaded = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  return loaded;
}

template <class Function>
void find(Function*& function, const char* name) {
  // LibTorch's GPU half has loaded it already.
  void* address = dlsym(RTLD_DEFAULT, name);
  if (address == nullptr && library() != nullptr) address = dlsym(library(), name);
  if (address == nullptr) {
    const char* const why = dlerror();
    throw Error(Exit::kDoesNotFit,
                {.area = "NCCL-34",
                 .what = std::string("NCCL cannot be loaded, which several GPUs need: ") +
                         (why == nullptr ? "an earlier attempt has failed" : why),
                 .place = kLibrary,
                 .next = "install the nvidia-nccl package that this LibTorch names, or train with --gpus 1"});
  }
  function = reinterpret_cast<Function*>(address);
}

NcclApi load() {
  NcclApi api{};
  find(api.version, "ncclGetVersion");
  find(api.error_string, "ncclGetErrorString");
  find(api.last_error, "ncclGetLastError");
  find(api.unique_id, "ncclGetUniqueId");
  find(api.init, "ncclCommInitRankConfig");
  find(api.finalize, "ncclCommFinalize");
  find(api.destroy, "ncclCommDestroy");
  find(api.abort, "ncclCommAbort");
  find(api.async_error, "ncclCommGetAsyncError");
  find(api.group_start, "ncclGroupStart");
  find(api.group_end, "ncclGroupEnd");
  find(api.send, "ncclSend");
  find(api.receive, "ncclRecv");
  find(api.broadcast, "ncclBroadcast");
  find(api.all_gather, "ncclAllGather");
  return api;
}

}  // namespace

const NcclApi& load_nccl() {
  static const NcclApi api = load();
  return api;
}

std::string nccl_version() {
  int code = 0;
  load_nccl().version(&code);
  return fmt::format("{}.{}.{}", code / 10000, code / 100 % 100, code % 100);
}

}  // namespace lm
