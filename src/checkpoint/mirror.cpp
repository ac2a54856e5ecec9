#include "checkpoint/mirror.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "checkpoint/manifest.h"
#include "checkpoint/restore.h"
#include "config/config_text.h"
#include "offload/io_failure.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// A temporary directory that is deleted unless it was renamed.
struct Temporary {
  explicit Temporary(std::string directory) : path(std::move(directory)) {
    if (::mkdir(path.c_str(), 0777) != 0) throw disk_error(errno, "cannot create the directory", path);
  }
  ~Temporary() {
    std::error_code ignored;
    if (!path.empty()) fs::remove_all(path, ignored);
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  std::string path;
};

// Whether all of it was copied.
bool copy_file(const std::string& from, const std::string& to, const CheckpointFile& file,
               const std::function<bool()>& stopped) {
  const File source(from + "/" + file.name);
  NewFile copy(to + "/" + file.name);
  std::vector<std::byte> bytes;
  for (const FileChunk& chunk : file.chunks) {
    if (stopped()) return false;
    bytes.resize(static_cast<size_t>(chunk.bytes));
    source.read_at(chunk.offset, bytes);
    if (chunk_checksum(bytes) != chunk.checksum)
      throw Error(Exit::kIntegrity, {.area = "INT-07",
                                     .what = "corrupted bytes in a checkpoint that is copied to the mirror",
                                     .place = fmt::format("{}, offset {}", source.path(), chunk.offset),
                                     .next = "check the disk"});
    copy.write(bytes);
  }
  copy.commit();
  return true;
}

void rename_directory(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) throw disk_error(errno, "cannot name the checkpoint", to);
}

}  // namespace

bool copy_checkpoint(const std::string& from, const std::string& directory,
                     const std::function<bool()>& stopped) {
  const Manifest manifest = read_manifest(from);
  if (const int failure = make_directories(directory); failure != 0)
    throw disk_error(failure, "cannot create the directory", directory);
  const std::string name = checkpoint_name(manifest.step), path = directory + "/" + name;
  // Names as of interrupted saves, which the next start and the next copy delete.
  Temporary temporary(path + fmt::format(".tmp-mirror-{}", getpid()));
  for (const CheckpointFile& file : manifest.files)
    if (!copy_file(from, temporary.path, file, stopped)) return false;
  atomic_write_file(temporary.path + "/" + kManifestName, manifest_text(manifest));  // syncs the directory
  CheckpointReader(temporary.path).verify();
  // Network file systems cannot exchange two directories in one step: an earlier copy of this step goes
  // first.
  std::error_code error;
  const std::string earlier = path + ".tmp-replaced";
  fs::remove_all(earlier, error);
  const bool again = fs::exists(path, error);
  if (again) rename_directory(path, earlier);
  rename_directory(temporary.path, path);
  temporary.path.clear();
  sync_directory(directory);
  if (again) fs::remove_all(earlier, error);
  return true;
}

Mirror::Mirror(MirrorSetup setup) : setup_(std::move(setup)), thread_([this] { work(); }) {}

Mirror::~Mirror() {
  {
    const std::lock_guard lock(mutex_);
    leave_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Mirror::add(const std::string& path, int64_t step, const std::vector<int64_t>& kept) {
  std::optional<Task> left_out;
  {
    const std::lock_guard lock(mutex_);
    left_out = std::exchange(next_, Task{path, step, kept});
  }
  changed_.notify_all();
  if (left_out)
    log_note("MIRR-41", fmt::format("the checkpoint of step {} is not copied to the mirror, which is slower "
                                    "than the saves: step {} is newer",
                                    left_out->step, step));
}

std::vector<int64_t> Mirror::in_use() {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> out;
  for (const std::optional<Task>* task : {&next_, &now_})
    if (*task) out.push_back((*task)->step);
  return out;
}

void Mirror::wait(const std::function<void()>& each) {
  std::unique_lock lock(mutex_);
  while (next_ || now_) {
    changed_.wait_for(lock, std::chrono::milliseconds(100));
    lock.unlock();
    each();
    lock.lock();
  }
}

void Mirror::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return leave_ || next_; });
    if (leave_) return;
    now_ = std::exchange(next_, std::nullopt);
    const Task task = *now_;
    lock.unlock();
    copy(task);
    lock.lock();
    now_.reset();
    changed_.notify_all();
  }
}

void Mirror::copy(const Task& task) {
  const auto stopped = [this] {
    const std::lock_guard lock(mutex_);
    return leave_;
  };
  const std::string checkpoints = setup_.directory + "/checkpoints";
  try {
    if (const int failure = make_directories(setup_.directory, 0700); failure != 0)
      throw disk_error(failure, "cannot create the directory", setup_.directory);
    // Before the checkpoint: who resumes from it must find what it was trained with.
    for (const std::string& name : setup_.files)
      if (fs::exists(setup_.run + "/" + name))
        atomic_write_file(setup_.directory + "/" + name, read_small_file(setup_.run + "/" + name, 1 << 20));
    if (!setup_.copy(task.path, checkpoints, stopped)) return;
    log_fields(fmt::format("MIRRORED step {}", task.step),
               {{"step", task.step}, {"checkpoint", checkpoints + "/" + checkpoint_name(task.step)}});
    retain_checkpoints(checkpoints, setup_.keep, task.step, task.kept);
  } catch (const std::exception& error) {
    log_warning("MIRR-41", fmt::format("the checkpoint of step {} is not in the mirror: {}; training "
                                       "continues, and the next checkpoint tries again",
                                       task.step, error.what()));
  }
}

}  // namespace lm
