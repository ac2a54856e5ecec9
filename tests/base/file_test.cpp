#include "base/file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>

#include "base/error.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "lm_file_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }
  std::string operator/(const std::string& name) const { return directory_ + "/" + name; }
  int64_t count() const { return std::distance(fs::directory_iterator(directory_), {}); }

  std::string directory_;
};

Exit code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  return Exit::kDone;
}

TEST_F(FileTest, ReadsWhatWasWrittenAndNothingPastTheEnd) {
  atomic_write_file(*this / "a", "0123456789");
  EXPECT_EQ(read_small_file(*this / "a", 10), "0123456789");
  EXPECT_EQ(code_of([&] { read_small_file(*this / "a", 9); }), Exit::kInput);
  const File file(*this / "a");
  EXPECT_EQ(file.size(), 10);
  std::string text(4, ' ');
  file.read_at(6, std::as_writable_bytes(std::span(text)));
  EXPECT_EQ(text, "6789");
  EXPECT_EQ(code_of([&] { file.read_at(7, std::as_writable_bytes(std::span(text))); }), Exit::kInput);
}

TEST_F(FileTest, OnlyRegularFilesAreOpened) {
  ASSERT_EQ(::mkfifo((*this / "fifo").c_str(), 0600), 0);
  fs::create_symlink("loop", *this / "loop");
  fs::create_symlink("absent", *this / "dangling");
  for (const std::string& path :
       {*this / "fifo", *this / "loop", *this / "dangling", *this / "absent", directory_,
        std::string("/dev/zero"), std::string(), *this / std::string("a\0b", 3)}) {
    EXPECT_EQ(code_of([&] { File file(path); }), Exit::kInput) << path;
  }
  atomic_write_file(*this / "real", "x");
  fs::create_symlink("real", *this / "link");
  EXPECT_EQ(read_small_file(*this / "link", 10), "x");
}

TEST_F(FileTest, ANewFileAppearsWholeOrNotAtAll) {
  atomic_write_file(*this / "a", "old");
  {
    NewFile file(*this / "a");
    file.write("new, but never committed");
  }
  EXPECT_EQ(read_small_file(*this / "a", 100), "old");
  NewFile file(*this / "a");
  file.write("ne");
  file.write("w");
  EXPECT_EQ(read_small_file(*this / "a", 100), "old");
  file.commit();
  EXPECT_EQ(file.size(), 3);
  EXPECT_EQ(read_small_file(*this / "a", 100), "new");
  EXPECT_EQ(count(), 1);
}

TEST_F(FileTest, WritingWhereItIsNotPossibleIsAnError) {
  EXPECT_EQ(code_of([&] { NewFile file(*this / "absent/a"); }), Exit::kIo);
  fs::create_directory(*this / "folder");
  EXPECT_EQ(code_of([&] { atomic_write_file(*this / "folder", "x"); }), Exit::kIo);
  EXPECT_EQ(count(), 1);
  // A full disk, without filling one: past the process's limit on a file's size, writing fails as it does
  // there.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 1000, .rlim_max = before.rlim_max};
  ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Exit code = code_of([&] { atomic_write_file(*this / "large", std::string(2000, 'x')); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(code, Exit::kNoSpace);
  EXPECT_EQ(count(), 1);
}

TEST_F(FileTest, DirectoriesAreMadeFromWhereTheProgramIs) {
  const fs::path before = fs::current_path();
  fs::current_path(directory_);
  EXPECT_EQ(make_directories("runs/first"), 0);
  EXPECT_EQ(make_directories("alone"), 0);
  EXPECT_EQ(make_directories("./a/../b/"), 0);
  EXPECT_EQ(make_directories("."), 0);
  fs::current_path(before);
  for (const char* made : {"runs/first", "alone", "b"}) EXPECT_TRUE(fs::is_directory(*this / made)) << made;
}

TEST_F(FileTest, ANewDirectoryReplacesOnlyWhenAsked) {
  {
    NewDirectory directory(*this / "deep/er/out/", false);
    atomic_write_file(directory.temporary() + "/a", "1");
    directory.commit();
  }
  EXPECT_EQ(read_small_file(*this / "deep/er/out/a", 10), "1");
  EXPECT_EQ(code_of([&] { NewDirectory directory(*this / "deep/er/out", false); }), Exit::kIncompatible);
  {
    NewDirectory directory(*this / "deep/er/out", true);
    atomic_write_file(directory.temporary() + "/b", "2");
    EXPECT_EQ(read_small_file(*this / "deep/er/out/a", 10), "1");
    directory.commit();
  }
  EXPECT_FALSE(fs::exists(*this / "deep/er/out/a"));
  EXPECT_EQ(read_small_file(*this / "deep/er/out/b", 10), "2");
  { const NewDirectory abandoned(*this / "deep/er/out", true); }
  EXPECT_EQ(std::distance(fs::directory_iterator(*this / "deep/er"), {}), 1);
  atomic_write_file(*this / "file", "x");
  EXPECT_EQ(code_of([&] { NewDirectory directory(*this / "file", true); }), Exit::kIncompatible);
  fs::create_directory(*this / "empty");
  NewDirectory directory(*this / "empty", false);
  directory.commit();
  EXPECT_TRUE(fs::is_directory(*this / "empty"));
}

}  // namespace
}  // namespace lm
