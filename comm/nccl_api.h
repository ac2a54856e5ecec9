// What ranks with GPUs need of NCCL, as a table of C functions: of the library that LibTorch's GPU half has
// loaded, else of libnccl.so.2. Nothing refers to it before a run of several GPUs asks for it by name, and
// nothing here needs its headers.
#pragma once

#include <cstddef>
#include <string>

namespace lm {

struct NcclId {
  char bytes[128];
};

// The beginning of ncclConfig_t as NCCL 2.14 knew it: later ones take it for that.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  // no call waits: so that whoever is lost can be noticed
};

// Values of ncclResult_t and ncclDataType_t.
inline constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
inline constexpr int kNcclBytes = 0;  // ncclInt8

// As NCCL's functions of these names; a communicator and a stream are pointers.
struct NcclApi {
  int (*version)(int* out);
  const char* (*error_string)(int result);
  const char* (*last_error)(void* comm);
  int (*unique_id)(NcclId* out);
  int (*init)(void** comm, int ranks, NcclId id, int rank, NcclConfig* config);
  int (*finalize)(void* comm);
  int (*destroy)(void* comm);
  int (*abort)(void* comm);
  int (*async_error)(void* comm, int* result);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int type, int peer, void* comm, void* stream);
  int (*receive)(void* to, size_t count, int type, int peer, void* comm, void* stream);
  int (*broadcast)(const void* from, void* to, size_t count, int type, int root, void* comm, void* stream);
  int (*all_gather)(const void* from, void* to, size_t count, int type, void* comm, void* stream);
};

// The library stays loaded. Throws Error(12) where it cannot be.
const NcclApi& load_nccl();
// "2.28.9"; throws the same.
std::string nccl_version();

}  // namespace lm
