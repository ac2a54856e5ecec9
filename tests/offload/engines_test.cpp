#include "offload/engines.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "support.h"

namespace lm {
namespace {

using namespace offload_tests;

class Engines : public ::testing::TestWithParam<IoEngineKind> {
 protected:
  void SetUp() override {
    if (GetParam() == IoEngineKind::kUring && !ring_allowed()) GTEST_SKIP() << "io_uring is refused here";
  }
  std::unique_ptr<IoEngine> make(int depth, bool buffers = true) {
    const std::span<std::byte> memory[] = {pool_.memory()};
    return make_engine(GetParam(),
                       {.files = space_.files(),
                        .buffers = buffers ? std::span<const std::span<std::byte>>(memory)
                                           : std::span<const std::span<std::byte>>(),
                        .depth = depth},
                       nullptr);
  }
  // The only result of one request.
  int64_t run(IoEngine& engine, const IoRequest& request) {
    std::vector<IoResult> results;
    engine.submit(request);
    while (results.empty()) engine.wait(results);
    EXPECT_EQ(results.size(), 1u);
    EXPECT_EQ(results[0].id, request.id);
    return results[0].result;
  }

  TemporaryDirectory directory_;
  SwapSpace space_{{{directory_.path()}}, 4 * kMiB};
  PinnedPool pool_{DeviceType::kCpu, 4 * kMiB};
};

TEST_P(Engines, ReadWhatTheyWroteInAnyOrder) {
  for (bool buffers : {true, false}) {
    const std::unique_ptr<IoEngine> engine = make(4, buffers);
    SCOPED_TRACE(engine->description());
    constexpr int64_t kBytes = 128 * kKiB;
    const int n = 16;
    PinnedBlock out = pool_.lease(n * kBytes), in = pool_.lease(n * kBytes);
    fill(out.bytes(), 7);
    for (IoDirection direction : {IoDirection::kWrite, IoDirection::kRead}) {
      std::set<uint64_t> open;
      std::vector<IoResult> results;
      for (int i = 0; i < n || !open.empty();) {
        while (i < n && static_cast<int>(open.size()) < engine->depth()) {
          std::byte* const memory = (direction == IoDirection::kWrite ? out : in).data() + i * kBytes;
          const auto id = static_cast<uint64_t>(i + 100);
          engine->submit({direction, 0, i * kBytes, memory, kBytes, id});
          open.insert(id);
          ++i;
        }
        results.clear();
        engine->wait(results);
        for (const IoResult& result : results) {
          EXPECT_EQ(open.erase(result.id), 1u);
          EXPECT_EQ(result.result, kBytes);
        }
      }
    }
    EXPECT_EQ(std::memcmp(out.data(), in.data(), static_cast<size_t>(n * kBytes)), 0);
  }
}

TEST_P(Engines, ReportWhatTheKernelRefuses) {
  const std::unique_ptr<IoEngine> engine = make(2, false);
  PinnedBlock block = pool_.lease(8192);
  EXPECT_EQ(run(*engine, {IoDirection::kRead, 0, space_.files()[0].bytes, block.data(), 4096, 1}), 0);
  void* nothing = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_EQ(run(*engine, {IoDirection::kWrite, 0, 0, static_cast<std::byte*>(nothing), 4096, 2}), -EFAULT);
  ::munmap(nothing, 4096);
  if (space_.direct(0)) {
    EXPECT_EQ(run(*engine, {IoDirection::kRead, 0, 1, block.data(), 4096, 3}), -EINVAL);
  }
  EXPECT_EQ(run(*engine, {IoDirection::kRead, 0, 4096, block.data(), 4096, 4}), 4096);
}

TEST_P(Engines, ReturnFromWaitWhenWokenByAnotherThread) {
  const std::unique_ptr<IoEngine> engine = make(2);
  std::vector<IoResult> results;
  engine->wake();  // before the wait
  engine->wait(results);
  EXPECT_TRUE(results.empty());
  for (int i = 0; i < 100; ++i) {
    std::thread other([&] { engine->wake(); });
    engine->wait(results);
    other.join();
  }
  EXPECT_TRUE(results.empty());
  PinnedBlock block = pool_.lease(4096);
  EXPECT_EQ(run(*engine, {IoDirection::kRead, 0, 0, block.data(), 4096, 1}), 4096);
}

INSTANTIATE_TEST_SUITE_P(Both, Engines, ::testing::Values(IoEngineKind::kUring, IoEngineKind::kThreads),
                         [](const auto& info) {
                           return info.param == IoEngineKind::kUring ? "uring" : "threads";
                         });

TEST(UringEngine, RegistersItsBuffersAndSaysSo) {
  if (!ring_allowed()) GTEST_SKIP() << "io_uring is refused here";
  const TemporaryDirectory directory;
  const SwapSpace space({{directory.path()}}, kMiB);
  PinnedPool pool(DeviceType::kCpu, kMiB);
  const std::span<std::byte> memory[] = {pool.memory()};
  const auto engine = make_uring_engine({.files = space.files(), .buffers = memory, .depth = 8});
  EXPECT_EQ(engine->depth(), 8);
  EXPECT_NE(engine->description().find("depth 8, registered files, "), std::string::npos)
      << engine->description();
}

TEST(UringEngine, CapsItsDepthToWhatTheRingTakes) {
  if (!ring_allowed()) GTEST_SKIP() << "io_uring is refused here";
  const auto engine = make_uring_engine({.files = {}, .buffers = {}, .depth = 1 << 30});
  EXPECT_GE(engine->depth(), 1024);
  EXPECT_LT(engine->depth(), 1 << 17);
}

TEST(UringEngine, RefusesFilesThatAreNotOpen) {
  if (!ring_allowed()) GTEST_SKIP() << "io_uring is refused here";
  const IoFile files[] = {{.descriptor = 999'999, .bytes = 1}};
  try {
    make_uring_engine({.files = files, .buffers = {}, .depth = 1});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kIo);
    EXPECT_NE(error.text().what.find("files"), std::string::npos) << error.report();
    EXPECT_NE(error.text().what.find("EBADF"), std::string::npos) << error.report();
  }
}

}  // namespace
}  // namespace lm
