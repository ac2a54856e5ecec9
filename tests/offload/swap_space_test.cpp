#include "offload/swap_space.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "base/bytes.h"
#include "base/error.h"
#include "support.h"

namespace lm {
namespace {

using namespace offload_tests;

// The error that `work` throws.
template <class Work>
ErrorText error_of(Exit code, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.report();
    return error.text();
  }
  ADD_FAILURE() << "no error";
  return {};
}

// Every byte of every file belongs to at most one extent.
void expect_disjoint(const SwapSpace& space, const std::vector<Extent>& extents) {
  std::vector<ExtentPiece> pieces;
  for (const Extent& extent : extents) {
    int64_t sum = 0;
    for (const ExtentPiece& piece : extent.pieces) {
      EXPECT_GT(piece.bytes, 0);
      EXPECT_EQ(piece.bytes % space.alignment(), 0);
      EXPECT_EQ(piece.offset % space.alignment(), 0);
      EXPECT_LE(piece.offset + piece.bytes, space.files()[static_cast<size_t>(piece.file)].bytes);
      sum += piece.bytes;
      pieces.push_back(piece);
    }
    EXPECT_EQ(sum, extent.bytes);
  }
  std::sort(pieces.begin(), pieces.end(), [](const ExtentPiece& a, const ExtentPiece& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  });
  for (size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i].file != pieces[i - 1].file) continue;
    EXPECT_GE(pieces[i].offset, pieces[i - 1].offset + pieces[i - 1].bytes);
  }
}

TEST(SwapSpace, HasNoNameAndReservesItsRoom) {
  const TemporaryDirectory directory;
  const SwapSpace space({{directory.path()}}, 10 * kMiB + 1);
  EXPECT_EQ(directory.entries(), 0);
  EXPECT_GE(space.alignment(), 4096);
  EXPECT_EQ(space.capacity(), round_up(10 * kMiB + 1, space.alignment()));
  ASSERT_EQ(space.files().size(), 1u);
  struct stat info {};
  ASSERT_EQ(::fstat(space.files()[0].descriptor, &info), 0);
  EXPECT_EQ(info.st_nlink, 0u);
  EXPECT_EQ(info.st_size, space.files()[0].bytes);
  EXPECT_GE(info.st_blocks * 512, space.files()[0].bytes);
}

TEST(SwapSpace, CountsItsSpaceExactly) {
  const TemporaryDirectory directory;
  SwapSpace space({{directory.path()}}, 3 * 4096);
  const int64_t step = space.alignment();
  if (step != 4096) GTEST_SKIP() << "alignment " << step;
  EXPECT_EQ(space.allocate(0).bytes, 0);
  EXPECT_EQ(space.allocate(1).bytes, 4096);
  EXPECT_EQ(space.allocate(4097).bytes, 8192);
  EXPECT_EQ(space.allocated(), space.capacity());
  error_of(Exit::kInternal, [&] { space.allocate(1); });
}

TEST(SwapSpace, PadsTails) {
  const TemporaryDirectory directory;
  const SwapSpace space({{directory.path()}}, 4096);
  if (space.alignment() != 4096) GTEST_SKIP() << "alignment " << space.alignment();
  EXPECT_EQ(space.padded(0), 0);
  for (int64_t bytes : {1, 511, 512, 4095, 4096}) EXPECT_EQ(space.padded(bytes), 4096) << bytes;
  EXPECT_EQ(space.padded(4097), 8192);
}

TEST(SwapSpace, StripesEveryLargeExtentByWeight) {
  const TemporaryDirectory a, b, c;
  SwapSpace space({{a.path(), 3}, {b.path(), 2}, {c.path(), 1}}, 60 * kMiB);
  std::vector<Extent> extents;
  for (int i = 0; i < 10; ++i) {
    extents.push_back(space.allocate(6 * kMiB));
    ASSERT_EQ(extents.back().pieces.size(), 3u);
    for (int file = 0; file < 3; ++file) {
      const double share =
          static_cast<double>(extents.back().pieces[static_cast<size_t>(file)].bytes) / (6.0 * kMiB);
      EXPECT_NEAR(share, (3.0 - file) / 6.0, 0.01) << "extent " << i;
    }
  }
  expect_disjoint(space, extents);
  EXPECT_EQ(space.allocated(), 60 * kMiB);
  EXPECT_EQ(space.path(1), b.path());
}

TEST(SwapSpace, GivesSmallExtentsToThePathFurthestBehind) {
  const TemporaryDirectory a, b;
  SwapSpace space({{a.path(), 1}, {b.path(), 1}}, 1 * kMiB);
  std::vector<Extent> extents;
  int64_t bytes[2] = {0, 0};
  for (int i = 0; i < 16; ++i) {
    extents.push_back(space.allocate(64 * kKiB));
    ASSERT_EQ(extents.back().pieces.size(), 1u);
    bytes[extents.back().pieces[0].file] += extents.back().bytes;
    EXPECT_LE(std::abs(bytes[0] - bytes[1]), 64 * kKiB);
  }
  expect_disjoint(space, extents);
  EXPECT_EQ(bytes[0], bytes[1]);
}

TEST(SwapSpace, HandsOutTheLastByteWhateverTheSizes) {
  const TemporaryDirectory a, b, c;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<int64_t> sizes;
    uint64_t x = seed * 2654435761u + 1;
    for (int i = 0; i < 40; ++i) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      sizes.push_back(static_cast<int64_t>((x >> 40) % (i % 4 == 0 ? 2'000'000 : 50'000)) + 1);
    }
    int64_t planned = 0;
    for (int64_t size : sizes) planned += round_up(size, 4096);
    SwapSpace space({{a.path(), 0.7}, {b.path(), 0.2}, {c.path(), 0.1}}, planned);
    if (space.alignment() != 4096) GTEST_SKIP() << "alignment " << space.alignment();
    std::vector<Extent> extents;
    for (int64_t size : sizes) extents.push_back(space.allocate(size));
    EXPECT_EQ(space.allocated(), space.capacity());
    expect_disjoint(space, extents);
  }
}

TEST(SwapSpace, SlicesAnExtentAcrossItsPieces) {
  const Extent extent{{{0, 8192, 4096}, {1, 0, 12288}, {0, 40960, 4096}}, 20480};
  const Extent part = slice(extent, 8192, 12288);
  ASSERT_EQ(part.pieces.size(), 2u);
  EXPECT_EQ(part.bytes, 12288);
  const auto piece = [&](size_t i) {
    return std::tuple(part.pieces[i].file, part.pieces[i].offset, part.pieces[i].bytes);
  };
  EXPECT_EQ(piece(0), std::tuple(1, 4096, 8192));
  EXPECT_EQ(piece(1), std::tuple(0, 40960, 4096));
}

// Pages of the range that memory holds of the file.
int64_t cached_pages(int descriptor, int64_t offset, int64_t bytes) {
  void* const pages = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, descriptor, offset);
  EXPECT_NE(pages, MAP_FAILED);
  std::vector<unsigned char> there(static_cast<size_t>(bytes / 4096));
  EXPECT_EQ(::mincore(pages, static_cast<size_t>(bytes), there.data()), 0);
  ::munmap(pages, static_cast<size_t>(bytes));
  return std::count_if(there.begin(), there.end(), [](unsigned char page) { return (page & 1) != 0; });
}

TEST(SwapSpace, DropsWhatMemoryHoldsOfItsBytes) {
  const TemporaryDirectory directory;
  constexpr int64_t kBytes = 8 * kMiB;
  SwapSpace space({{directory.path()}}, kBytes);
  const Extent extent = space.allocate(kBytes);
  const int descriptor = space.files()[0].descriptor;
  ASSERT_EQ(::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) & ~O_DIRECT), 0);
  const std::vector<char> bytes(kBytes, 'x');
  ASSERT_EQ(::pwrite(descriptor, bytes.data(), bytes.size(), 0), std::ssize(bytes));
  ASSERT_EQ(cached_pages(descriptor, 0, kBytes), kBytes / 4096);
  space.drop_cached(slice(extent, 512 * kKiB, 8192));
  EXPECT_EQ(cached_pages(descriptor, 512 * kKiB, 8192), 0);
  EXPECT_EQ(cached_pages(descriptor, kBytes / 2, kBytes / 2), kBytes / 2 / 4096);
}

TEST(SwapSpace, RefusesAPathThatIsMissingOrNoDirectory) {
  const TemporaryDirectory directory;
  const std::string missing = directory.path() + "/none";
  EXPECT_EQ(error_of(Exit::kDoesNotFit, [&] { SwapSpace({{missing}}, 4096); }).place, missing);
  error_of(Exit::kDoesNotFit, [&] { SwapSpace({{"/proc/self/status"}}, 4096); });
}

TEST(SwapSpace, RefusesMoreThanIsFreeAndSaysHowMuchItNeedsAndHas) {
  const TemporaryDirectory directory;
  const int64_t bytes = int64_t{1} << 55;
  const ErrorText text = error_of(Exit::kNoSpace, [&] { SwapSpace({{directory.path()}}, bytes); });
  EXPECT_EQ(text.place, directory.path());
  EXPECT_NE(text.what.find(std::to_string(bytes)), std::string::npos) << text.what;
  EXPECT_NE(text.what.find("are free"), std::string::npos) << text.what;
  EXPECT_NE(text.what.find("ENOSPC"), std::string::npos) << text.what;
  EXPECT_EQ(directory.entries(), 0);
}

TEST(SwapSpace, RefusesAFileSystemWithoutAnonymousFiles) {
  // proc refuses to make files at all
  const ErrorText text = [&] {
    try {
      SwapSpace({{"/proc/self"}}, 4096);
    } catch (const Error& error) {
      return error.text();
    }
    return ErrorText{};
  }();
  EXPECT_EQ(text.place, "/proc/self");
}

}  // namespace
}  // namespace lm
