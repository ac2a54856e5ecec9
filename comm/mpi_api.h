// What the ranks of several machines need of MPI, as a table of C functions: the plugin lmlaunch-mpi.so gives
// Open MPI's, a test its own. Nothing else knows MPI, so that a run which is in no MPI job neither links nor
// loads it. All functions are called by one thread, the one that calls `join`.
#pragma once

#include <cstdint>
#include <string>

namespace lm {

// Messages of one channel from one rank to another keep their order.
enum class MpiChannel : int32_t { kData, kNotices };

struct MpiArrival {
  int32_t from = 0;
  int32_t tag = 0;
  int64_t bytes = 0;  // -1: the message is longer than its memory
};

// Where a message goes.
struct MpiAddress {
  int32_t to = 0;
  MpiChannel channel = MpiChannel::kData;
  int32_t tag = 0;
};

struct MpiApi {
  // Waits for all processes of the job. 0, or another number with a reason in `text`.
  int (*join)(int* rank, int* ranks, char* text, int text_bytes);
  // Begun and not waited for; null with a reason in `text`. `from` -1: any rank. Memory stays the request's.
  void* (*send)(const void* data, int64_t bytes, const MpiAddress* address, char* text, int text_bytes);
  void* (*receive)(void* data, int64_t bytes, int from, MpiChannel channel, char* text, int text_bytes);
  // 1: complete, and the request is gone; 0: not yet; -1: failed, with a reason.
  int (*test)(void* request, MpiArrival* arrival, char* text, int text_bytes);
  // In order, with all others.
  void (*leave)();
};

inline constexpr int64_t kMostMessage = int64_t{1} << 30;  // bytes of one

// The plugin's only symbols.
inline constexpr char kMpiApiSymbol[] = "lm_mpi_api", kMpiVersionSymbol[] = "lm_mpi_version";

// Loads the plugin, which stays loaded. Throws Error(12) where it cannot be, or finds no Open MPI.
const MpiApi& load_mpi(const std::string& plugin);
// "Open MPI v4.1.4"; throws the same.
std::string mpi_version(const std::string& plugin);

}  // namespace lm
