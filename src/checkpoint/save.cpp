#include "checkpoint/save.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "config/config_text.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr char kShard[] = "rank00000.safetensors";

// The name and the directories above it last longer than the process.
void make_directories(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return;
  fs::create_directories(path, error);
  if (error) throw disk_error(error.value(), "cannot create the directory", path);
  sync_directory(fs::path(path).parent_path().string());
}

std::string random_name() {
  std::random_device random;
  char text[24];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

void check_room(const std::string& directory, int64_t bytes) {
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) != 0 || info.f_blocks == 0) return;  // 0: nobody knows
  const auto free = static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
  const int64_t needed = bytes + bytes / 20;
  if (free >= needed) return;
  throw disk_error(ENOSPC,
                   "a checkpoint needs " + format_bytes(needed) + ", " + format_bytes(free) + " are free",
                   directory);
}

}  // namespace

int64_t checkpoint_bytes(const StateCatalogue& catalogue) {
  constexpr int64_t kSmall = 256 * kKiB;  // manifest, header and directory of a small model
  int64_t bytes = kSmall;
  for (const StateEntry& entry : catalogue) bytes += entry.unit < 0 ? 0 : entry.bytes() + 512;
  return bytes;
}

Save::Save(const SaveSetup& setup) : path_(setup.directory + "/" + checkpoint_name(setup.step)) {
  make_directories(setup.directory);
  check_room(setup.directory, checkpoint_bytes(setup.catalogue));
  std::vector<TensorInfo> tensors;
  for (const StateEntry& entry : setup.catalogue) {
    if (entry.unit < 0 || !places_.emplace(entry.name, arrays_.size()).second) continue;
    arrays_.push_back({.name = entry.name, .dtype = entry.dtype, .elements = entry.shape.front()});
    tensors.push_back({entry.name, entry.dtype, entry.shape});
  }
  const std::string temporary = path_ + ".tmp-" + random_name();
  if (::mkdir(temporary.c_str(), 0777) != 0)
    throw disk_error(errno, "cannot create the directory", temporary);
  temporary_ = temporary;
  try {
    shard_ = std::make_unique<ShardWriter>(ShardSetup{.path = temporary_ + "/" + kShard,
                                                      .arrays = std::move(tensors),
                                                      .engine = setup.engine,
                                                      .make_engine = setup.make_engine});
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
    throw;
  }
  for (size_t i = 0; i < arrays_.size(); ++i) arrays_[i].offset = shard_->offset(i);
}

Save::~Save() {
  if (temporary_.empty()) return;
  shard_.reset();
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

void Save::write(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes) {
  if (entry.unit < 0) {
    int64_t value = 0;
    LM_CHECK(bytes.size() == sizeof value && offset == 0, entry.name);
    std::memcpy(&value, bytes.data(), sizeof value);
    numbers_[entry.name] = value;
    return;
  }
  const int64_t begin = entry.first * static_cast<int64_t>(dtype_size(entry.dtype));
  shard_->write(places_.at(entry.name), begin + offset, bytes);
}

std::string Save::commit(Manifest manifest, const std::function<void()>& allowed) {
  manifest.files = {shard_->finish()};
  shard_.reset();
  manifest.arrays = arrays_;
  manifest.numbers = numbers_;
  atomic_write_file(temporary_ + "/" + kManifestName, manifest_text(manifest));  // also syncs the directory
  if (allowed) allowed();
  // An earlier checkpoint of this step gives way in one step, and goes when it is no longer needed.
  std::error_code error;
  const bool again = fs::exists(path_, error);
  const unsigned how = again ? RENAME_EXCHANGE : 0;
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), how) != 0)
    throw disk_error(errno, "cannot name the checkpoint", path_);
  const std::string earlier = std::exchange(temporary_, "");
  sync_directory(fs::path(path_).parent_path().string());
  if (again) fs::remove_all(earlier, error);
  return path_;
}

}  // namespace lm
