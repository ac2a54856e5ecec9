// Open MPI behind MpiApi, as a shared object of its own.
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>

#include <cstdio>

#include "comm/mpi_api.h"

namespace lm {
namespace {

MPI_Comm channels[2] = {MPI_COMM_NULL, MPI_COMM_NULL};

bool failed(int code, const char* call, char* text, int text_bytes) {
  if (code == MPI_SUCCESS) return false;
  char reason[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, reason, &length);
  std::snprintf(text, static_cast<size_t>(text_bytes), "%s: %s", call, reason);
  return true;
}

int join(int* rank, int* ranks, char* text, int text_bytes) {
  int provided = 0;
  // The calling thread is MPI's main thread, whatever the process calls its own.
  if (failed(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread", text,
             text_bytes))
    return 1;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, rank);
  MPI_Comm_size(MPI_COMM_WORLD, ranks);
  for (MPI_Comm& channel : channels) {
    if (failed(MPI_Comm_dup(MPI_COMM_WORLD, &channel), "MPI_Comm_dup", text, text_bytes)) return 1;
    MPI_Comm_set_errhandler(channel, MPI_ERRORS_RETURN);
  }
  return 0;
}

void* send(const void* data, int64_t bytes, const MpiAddress* address, char* text, int text_bytes) {
  auto* const request = new MPI_Request;
  if (!failed(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, address->to, address->tag,
                        channels[static_cast<int>(address->channel)], request),
              "MPI_Isend", text, text_bytes))
    return request;
  delete request;
  return nullptr;
}

void* receive(void* data, int64_t bytes, int from, MpiChannel channel, char* text, int text_bytes) {
  auto* const request = new MPI_Request;
  if (!failed(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from < 0 ? MPI_ANY_SOURCE : from,
                        MPI_ANY_TAG, channels[static_cast<int>(channel)], request),
              "MPI_Irecv", text, text_bytes))
    return request;
  delete request;
  return nullptr;
}

int test(void* request, MpiArrival* arrival, char* text, int text_bytes) {
  auto* const handle = static_cast<MPI_Request*>(request);
  int done = 0, bytes = 0;
  MPI_Status status{};
  const int result = MPI_Test(handle, &done, &status);
  int kind = MPI_SUCCESS;
  MPI_Error_class(result, &kind);
  // One of another collective: its tag says so, or its length.
  const bool longer = kind == MPI_ERR_TRUNCATE && done != 0;
  if (!longer && failed(result, "MPI_Test", text, text_bytes)) return -1;
  if (done == 0) return 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  *arrival = {status.MPI_SOURCE, status.MPI_TAG, longer ? -1 : bytes};
  delete handle;
  return 1;
}

void leave() {
  MPI_Finalize();
}

const MpiApi api{join, send, receive, test, leave};

}  // namespace
}  // namespace lm

extern "C" {
const lm::MpiApi* lm_mpi_api() {
  return &lm::api;
}
void lm_mpi_version(char* text, int text_bytes) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(version, &length);
  std::snprintf(text, static_cast<size_t>(text_bytes), "%s", version);
}
}
