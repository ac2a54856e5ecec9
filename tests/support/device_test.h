// Tests that are built for the CPU and for a GPU, and skip in the latter where there is none.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/cuda.h"

namespace lm {

class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_built() && cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};

}  // namespace lm
