#include "support.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "base/checksum.h"
#include "base/error.h"

namespace lm::offload_tests {
namespace fs = std::filesystem;

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (fs::current_path() / "offload_test_XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp: " + pattern);
  path_ = pattern;
  fs::permissions(path_, fs::perms::all);
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

int TemporaryDirectory::entries() const {
  return static_cast<int>(std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
}

namespace {

// The command's output, without the line break; nothing when it failed.
std::string output_of(const std::string& command) {
  std::string out;
  FILE* pipe = ::popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  char line[256];
  while (std::fgets(line, sizeof line, pipe) != nullptr) out += line;
  if (::pclose(pipe) != 0) return "";
  while (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool runs(const std::string& command) {
  return !output_of(command + " >&2 && echo yes").empty();
}

}  // namespace

LoopDisk::LoopDisk(const std::string& file_system, int64_t bytes, int sector, const std::string& backing) {
  if (::geteuid() != 0) {
    why_not_ = "needs root";
    return;
  }
  image_ = (backing.empty() ? directory_.path() : backing) + "/image";
  mount_ = directory_.path() + "/mount";
  fs::create_directory(mount_);
  if (!runs("truncate -s " + std::to_string(bytes) + " " + image_)) why_not_ = "no image file";
  device_ = output_of("losetup --find --show --sector-size " + std::to_string(sector) + " " + image_);
  if (device_.empty()) {
    why_not_ = "no loop device with sectors of " + std::to_string(sector);
    return;
  }
  if (!runs("mkfs." + file_system + " -q " + device_)) {
    why_not_ = "no mkfs." + file_system;
    return;
  }
  if (::mount(device_.c_str(), mount_.c_str(), file_system.c_str(), 0, "") != 0) {
    why_not_ = "cannot mount " + file_system;
    return;
  }
  mounted_ = true;
  fs::permissions(mount_, fs::perms::all);
}

LoopDisk::~LoopDisk() {
  // The engines have let go of the files: a busy file system is a leak.
  if (mounted_ && ::umount(mount_.c_str()) != 0) {
    ADD_FAILURE() << "umount: " << std::strerror(errno);
    ::umount2(mount_.c_str(), MNT_DETACH);
  }
  if (!device_.empty()) runs("losetup -d " + device_);
}

ChildResult run_in_child(const std::function<std::string()>& work) {
  int pipe[2];
  if (::pipe(pipe) != 0) throw std::runtime_error("pipe");
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) {
    ::close(pipe[0]);
    int status = 0;
    std::string text;
    try {
      text = work();
    } catch (const Error& error) {
      text = error.report();
      status = static_cast<int>(error.code());
    } catch (const std::exception& error) {
      text = error.what();
      status = 99;
    }
    if (::write(pipe[1], text.data(), text.size()) < 0) status = 98;
    ::_exit(status);
  }
  ::close(pipe[1]);
  ChildResult result;
  char buffer[4096];
  for (ssize_t n = 0; (n = ::read(pipe[0], buffer, sizeof buffer)) > 0;)
    result.text.append(buffer, static_cast<size_t>(n));
  ::close(pipe[0]);
  ::waitpid(child, &result.status, 0);
  return result;
}

void fill(std::span<std::byte> bytes, uint64_t seed) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + 1;
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    std::memcpy(&bytes[i], &x, 8);
  }
}

std::vector<uint64_t> chunk_checksums(std::span<const std::byte> bytes) {
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < bytes.size(); i += kChunk)
    sums.push_back(chunk_checksum(bytes.subspan(i, std::min<size_t>(kChunk, bytes.size() - i))));
  return sums;
}

std::vector<size_t> wrong_chunks(std::span<const std::byte> bytes, const std::vector<uint64_t>& checksums) {
  const std::vector<uint64_t> found = chunk_checksums(bytes);
  std::vector<size_t> wrong;
  for (size_t i = 0; i < found.size(); ++i) {
    if (i >= checksums.size() || found[i] != checksums[i]) wrong.push_back(i);
  }
  return wrong;
}

bool ring_allowed() {
  try {
    make_uring_engine({.files = {}, .buffers = {}, .depth = 1});
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::unique_ptr<IoQueue> make_queue(SwapSpace& space, const PinnedPool& pool, IoEngineKind kind,
                                    int64_t block, int depth) {
  return std::make_unique<IoQueue>(
      space,
      [&space, &pool, kind, depth] {
        const std::span<std::byte> buffers[] = {pool.memory()};
        std::string note;
        return make_engine(kind, {.files = space.files(), .buffers = buffers, .depth = depth}, &note);
      },
      block);
}

namespace {

constexpr int64_t kArrays[] = {4096, 5 * 8192, 200 * 1024};

}  // namespace

int64_t workload_bytes() {
  int64_t bytes = 0;
  for (int64_t array : kArrays) bytes += array;
  return bytes;
}

int64_t workload_pool_bytes() {
  return 2 * workload_bytes();
}

WorkloadResult run_workload(SwapSpace& space, IoQueue& queue, PinnedPool& pool, uint64_t seed) {
  struct Array {
    Extent extent;
    PinnedBlock out, in;
    std::vector<uint64_t> sums;
    Ticket last = 0;
    std::string name;
  };
  std::vector<Array> arrays;
  for (int64_t bytes : kArrays) {
    arrays.push_back({space.allocate(bytes),
                      pool.lease(bytes),
                      pool.lease(bytes),
                      {},
                      0,
                      "array " + std::to_string(arrays.size())});
  }
  WorkloadResult result;
  const auto check = [&](Array& a) {
    queue.wait(a.last);
    result.chunks += a.sums.size();
    result.wrong += wrong_chunks(a.in.bytes(), a.sums).size();
  };
  for (uint64_t round = 0; round < 3; ++round) {
    for (Array& a : arrays) {
      if (round > 0) check(a);  // frees both blocks, while later arrays are still under way
      fill(a.out.bytes(), seed + round);
      a.sums = chunk_checksums(a.out.bytes());
      fill(a.in.bytes(), ~seed);
      const Ticket written = queue.write(a.extent, a.out.data(), a.out.size(), a.name);
      a.last = queue.read(a.extent, a.in.data(), a.in.size(), a.name, {{written}});
    }
  }
  for (Array& a : arrays) {
    check(a);
    result.sums.insert(result.sums.end(), a.sums.begin(), a.sums.end());
  }
  queue.drain();
  return result;
}

}  // namespace lm::offload_tests
