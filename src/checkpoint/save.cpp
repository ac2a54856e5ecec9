#include "checkpoint/save.h"

#include <fcntl.h>
#include <fmt/format.h>
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

std::string shard_name(int rank) {
  char name[32];
  std::snprintf(name, sizeof name, "rank%05d.safetensors", rank);
  return name;
}

std::string random_name() {
  std::random_device random;
  char text[24];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

void check_room(const std::string& directory, int64_t bytes) {
  struct statvfs info {};
  if (::statvfs(directory.c_str(), &info) != 0 || info.f_blocks == 0) return;  // 0: unknown
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

Save::Save(const SaveSetup& setup)
    : group_(setup.group != nullptr ? *setup.group : alone_),
      path_(setup.directory + "/" + checkpoint_name(setup.step)) {
  list(setup.catalogue);
  std::vector<TensorInfo> tensors;
  for (const SavedArray& array : arrays_) {
    const bool part = places_.at(array.name).size() > 1 || group_.ranks() > 1;
    const std::string name = part ? fmt::format("{}.{}", array.name, array.first) : array.name;
    tensors.push_back({name, array.dtype, {array.elements}});
  }
  // Ranks have unequal parts: of whole matrices the first one may have an embedding that no other shares.
  int64_t bytes = 0;
  for (const int64_t of_rank : group_.gather("a checkpoint's size", checkpoint_bytes(setup.catalogue)))
    bytes += of_rank;
  together(group_, "a checkpoint's directory", [&] {
    if (group_.rank() == 0) make_directory(setup.directory, bytes);
  });
  temporary_ = gather_texts(group_, "a checkpoint's name", temporary_).front();
  try {
    together(group_, "a checkpoint's file", [&] {
      shard_ = std::make_unique<ShardWriter>(ShardSetup{.path = temporary_ + "/" + shard_name(group_.rank()),
                                                        .arrays = std::move(tensors),
                                                        .ranks = group_.ranks(),
                                                        .copies = setup.copies,
                                                        .buffers = setup.buffers,
                                                        .engine = setup.engine,
                                                        .make_engine = setup.make_engine});
    });
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
    throw;
  }
  for (size_t i = 0; i < arrays_.size(); ++i) arrays_[i].offset = shard_->offset(i);
}

// Merges contiguous entries: with one rank into the whole array.
void Save::list(const StateCatalogue& catalogue) {
  for (const StateEntry& entry : catalogue) {
    if (entry.unit < 0) continue;
    std::vector<size_t>& parts = places_[entry.name];
    SavedArray* const last = parts.empty() ? nullptr : &arrays_[parts.back()];
    if (last != nullptr && last->first + last->elements == entry.first) {
      last->elements += entry.elements;
      continue;
    }
    parts.push_back(arrays_.size());
    arrays_.push_back(
        {.name = entry.name, .dtype = entry.dtype, .first = entry.first, .elements = entry.elements});
  }
}

void Save::make_directory(const std::string& directory, int64_t bytes) {
  if (const int failure = make_directories(directory); failure != 0)
    throw disk_error(failure, "cannot create the directory", directory);
  const std::string temporary = path_ + ".tmp-" + random_name();
  if (::mkdir(temporary.c_str(), 0777) != 0)
    throw disk_error(errno, "cannot create the directory", temporary);
  // Checked only now: a file system that has turned read-only still has the remains of an earlier save, and
  // free space is then not the problem.
  try {
    check_room(directory, bytes);
  } catch (...) {
    ::rmdir(temporary.c_str());
    throw;
  }
  temporary_ = temporary;
}

Save::~Save() {
  if (temporary_.empty()) return;
  shard_.reset();
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

void Save::put(const StateEntry& entry, int64_t offset, std::span<const std::byte> bytes,
               std::vector<Write>* lent, int threads) {
  if (entry.unit < 0) {
    int64_t value = 0;
    LM_CHECK(bytes.size() == sizeof value && offset == 0, entry.name);
    std::memcpy(&value, bytes.data(), sizeof value);
    numbers_[entry.name] = value;
    return;
  }
  for (const size_t i : places_.at(entry.name)) {
    const SavedArray& part = arrays_[i];
    if (entry.first < part.first || entry.first >= part.first + part.elements) continue;
    const int64_t begin = (entry.first - part.first) * static_cast<int64_t>(dtype_size(entry.dtype));
    return shard_->write(i, begin + offset, bytes, lent, threads);
  }
  LM_CHECK(false, entry.name + " is not in the catalogue");
}

std::string Save::commit(Manifest manifest, const std::function<void()>& allowed) {
  together(group_, "a checkpoint's file", [&] { manifest.files = {shard_->finish()}; });
  manifest.arrays = arrays_;
  manifest.numbers = numbers_;
  if (group_.ranks() > 1) add_others(manifest);
  together(group_, "a checkpoint's commit", [&] {
    if (group_.rank() == 0) publish(manifest, allowed);
  });
  temporary_.clear();
  return path_;
}

void Save::add_others(Manifest& manifest) {
  Manifest mine;
  mine.files = manifest.files;
  mine.arrays = manifest.arrays;
  const std::vector<std::string> all = gather_texts(group_, "a checkpoint's files", manifest_text(mine));
  for (size_t rank = 1; group_.rank() == 0 && rank < all.size(); ++rank) {
    Manifest other = parse_manifest(all[rank], fmt::format("rank {}", rank));
    manifest.files.push_back(std::move(other.files.front()));
    for (SavedArray& array : other.arrays) {
      array.file = rank;
      manifest.arrays.push_back(std::move(array));
    }
  }
}

void Save::publish(const Manifest& manifest, const std::function<void()>& allowed) {
  const std::string text = manifest_text(manifest);
  if (std::ssize(text) > kMostManifestBytes) {
    throw Error(Exit::kDoesNotFit, {.area = "CKPT-07",
                                    .what = "the manifest would have " + format_bytes(std::ssize(text)) +
                                            ", more than a reader accepts",
                                    .place = path_,
                                    .next = "use fewer ranks"});
  }
  atomic_write_file(temporary_ + "/" + kManifestName, text);  // also syncs the directory
  if (allowed) allowed();
  // An earlier checkpoint of this step is exchanged atomically, and deleted afterwards.
  std::error_code error;
  const bool again = fs::exists(path_, error);
  const unsigned how = again ? RENAME_EXCHANGE : 0;
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), how) != 0)
    throw disk_error(errno, "cannot name the checkpoint", path_);
  const std::string earlier = std::exchange(temporary_, "");
  sync_directory(fs::path(path_).parent_path().string());
  if (again) fs::remove_all(earlier, error);
}

}  // namespace lm
