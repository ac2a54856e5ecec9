#include "kernels/library_error.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <dnnl.hpp>

#include "base/bytes.h"
#include "kernels/runtime.h"

namespace lm {
namespace {

Error translated(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return library_error(error);
  }
  return {Exit::kDone, {}};
}

TEST(LibraryError, MemoryThatRunsOutIsExit30WithTheBytesAskedAndFree) {
  const Error error = translated([] {
    TORCH_CHECK_WITH(
        OutOfMemoryError, false,
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
        "of which 1.50 GiB is free. Process 1 has ...");
  });
  EXPECT_EQ(error.code(), Exit::kDeviceMemory);
  EXPECT_EQ(error.text().area, "MEM-15");
  EXPECT_EQ(error.text().what, "GPU memory: LibTorch asked for 2.00 GiB, 1.50 GiB free");
  EXPECT_FALSE(error.text().next.empty());
  const Error blas = translated([] {
    TORCH_CHECK(false, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
  });
  EXPECT_EQ(blas.code(), Exit::kDeviceMemory);
}

// What its allocator really throws, for more than there are addresses: a machine that overcommits grants 2^46
// bytes.
TEST(LibraryError, HostMemoryThatRunsOutIsExit31WithTheBytesAsked) {
  const Error error = translated([] { at::empty({int64_t{1} << 60}, at::TensorOptions().dtype(at::kByte)); });
  EXPECT_EQ(error.code(), Exit::kHostMemory) << error.report();
  EXPECT_EQ(error.text().area, "MEM-16");
  EXPECT_EQ(error.text().what, "out of host memory: LibTorch asked for 1152921504606846976 bytes");
  EXPECT_FALSE(error.text().next.empty());
}

TEST(LibraryError, WhatOneDnnAndTheLibraryOfCPlusPlusGetNoMemoryForIsToo) {
  EXPECT_EQ(translated([] { throw std::bad_alloc(); }).code(), Exit::kHostMemory);
  const Error error =
      translated([] { throw dnnl::error(dnnl_out_of_memory, "could not create a primitive"); });
  EXPECT_EQ(error.code(), Exit::kHostMemory);
  EXPECT_EQ(error.text().what, "out of host memory: oneDNN could not create a primitive");
  EXPECT_EQ(translated([] { throw dnnl::error(dnnl_invalid_arguments, "wrong"); }).code(), Exit::kInternal);
  EXPECT_EQ(translated([] { throw std::out_of_range("map::at"); }).text().what, "map::at");
}

TEST(LibraryError, EverythingElseIsABugInOneLine) {
  const Error error = translated([] { TORCH_CHECK(false, "sizes differ"); });
  EXPECT_EQ(error.code(), Exit::kInternal);
  EXPECT_EQ(error.text().what, "sizes differ");
}

TEST(LibraryErrorOnAGpu, IsWhatItsAllocatorThrows) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  start_torch(DeviceType::kCuda, 1, true);
  EXPECT_EQ(library_device_bytes(), 0);
  const at::Tensor some = at::empty({1000}, at::TensorOptions().device(at::kCUDA).dtype(at::kByte));
  EXPECT_EQ(library_device_bytes(), 2 * kMiB);  // what it asks for at once
  const Error error = translated(
      [] { at::empty({int64_t{1} << 45}, at::TensorOptions().device(at::kCUDA).dtype(at::kByte)); });
  EXPECT_EQ(error.code(), Exit::kDeviceMemory) << error.report();
  EXPECT_NE(error.text().what.find("asked for 32768.00 GiB"), std::string::npos) << error.report();
  EXPECT_NE(error.text().what.find("iB free"), std::string::npos) << error.report();
}

}  // namespace
}  // namespace lm
