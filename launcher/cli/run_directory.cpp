#include "launcher/cli/run_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <random>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "launcher/recorded.h"
#include "launcher/status.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// A run that has just taken the lock has not written its record yet.
constexpr std::chrono::milliseconds kOwnerWait{100};
// A killed run keeps its lock until the last of its processes has returned its memory.
constexpr std::chrono::seconds kEndingWait{10};
constexpr std::chrono::milliseconds kLockPause{2};

// ".ended.JOB": how the first failed rank of an MPI job has ended.
constexpr std::string_view kEndedPrefix = ".ended.";

std::string ended_path(const std::string& directory, const std::string& job) {
  return directory + "/" + std::string(kEndedPrefix) + job;
}

Error incompatible(const std::string& what, const std::string& directory, const std::string& next) {
  return Error(
      Exit::kIncompatible,
      {.area = "RUN-26", .what = what, .place = directory, .next = next, .kept = "the directory, untouched"});
}

// Files that a run may write before its first step.
bool early_file(const std::string& name) {
  static constexpr std::array kNames = {
      ".lock",    ".preflight",      "config.toml", "numerics.json", "plan.json",           "plan.txt",
      "log.txt",  "status.json",     "report.html", "tensorboard",   "chat_template.jinja", "tokens",
      "date.txt", "base_model.json", "follow",      "on_commit"};
  if (name.starts_with("log.rank") || name.starts_with(kEndedPrefix)) return true;
  for (const char* known : kNames) {
    if (name == known || name.starts_with(std::string(known) + ".")) return true;  // "status.json.tmp-..."
  }
  return false;
}

// Temporary names, "status.json.tmp-123-4", "model.tmp-123-9": the write was interrupted before the rename.
bool cut_off(const std::string& name) {
  if (name.starts_with(kEndedPrefix)) return true;  // from an earlier job
  const size_t at = name.find(".tmp-");
  if (at == std::string::npos) return false;
  const std::string whole = name.substr(0, at);
  return whole == "model" || (whole != ".lock" && early_file(whole));
}

// " at 2026-01-31T12:00:00Z": when its status was written, the last write of a run; "" if unknown.
std::string finished_at(const std::string& directory) {
  struct stat info {};
  if (stat((directory + "/status.json").c_str(), &info) != 0) return "";
  return " at " + time_text(info.st_mtim.tv_sec);
}

bool empty_file(const fs::directory_entry& entry) {
  std::error_code error;
  return entry.is_regular_file(error) && entry.file_size(error) == 0;
}

// Whether the directory has only files that a run writes before its first step.
bool only_early_files(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (!early_file(entry.path().filename().string()) && !empty_file(entry)) return false;
  }
  return true;
}

bool nothing_to_lose(const std::string& directory) {
  const std::optional<RunStatus> status = read_status(directory);
  return status && status->state == "failed" && status->step == 0 && only_early_files(directory);
}

// Reads at most 1 KiB of a file of /proc.
std::string read_start(const std::string& path) {
  char buffer[1024];
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd < 0 ? 0 : read(fd, buffer, sizeof buffer);
  if (fd >= 0) close(fd);
  return {buffer, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

// Field 22 of /proc/PROCESS/stat: the start time in clock ticks since boot, which with the pid identifies a
// process for good. "" if there is none, or only a zombie.
std::string start_time(const std::string& process) {
  const std::string text = read_start("/proc/" + process + "/stat");
  size_t at = text.rfind(')');  // the process's name before it may contain spaces
  if (at != std::string::npos && (text.substr(at, 3) == ") Z" || text.substr(at, 3) == ") X")) return "";
  for (int field = 2; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
  return at == std::string::npos ? "" : text.substr(at + 1, text.find(' ', at + 1) - at - 1);
}

std::string boot_id() {
  const std::string text = read_start("/proc/sys/kernel/random/boot_id");
  return text.substr(0, text.find('\n'));
}

std::string owner_record() {
  const std::string started = time_text(std::time(nullptr));
  char run_id[24];
  std::random_device random;
  std::snprintf(run_id, sizeof run_id, "%08x%08x", random(), random());
  const Json json = {{"host", host_name()}, {"boot_id", boot_id()},
                     {"pid", getpid()},     {"start_time", start_time("self")},
                     {"started", started},  {"run_id", run_id}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

// Owner of the lock, from its record.
struct LockOwner {
  std::string text;   // "" if not yet written
  bool gone = false;  // the process was on this machine, and has ended
};

LockOwner lock_owner(int fd) {
  char buffer[2048];
  const ssize_t n = pread(fd, buffer, sizeof buffer, 0);
  if (n <= 0) return {};
  try {
    const Json json =
        parse_json(std::string_view(buffer, static_cast<size_t>(n)), ".lock", {.bytes = 2048, .depth = 4});
    const auto pid = json.at("pid").get<int64_t>();
    LockOwner out;
    out.text =
        fmt::format("process {} on host {}, started {}, run {}", pid, json.at("host").get<std::string>(),
                    json.at("started").get<std::string>(), json.at("run_id").get<std::string>());
    out.gone = json.at("boot_id").get<std::string>() == boot_id() &&
               json.at("start_time").get<std::string>() != start_time(std::to_string(pid));
    return out;
  } catch (const std::exception&) {
    return {};
  }
}

// Waits only for a run that is ending or has not written its record. False: another run has the lock,
// `owner`; errno has the reason.
bool take_lock(int fd, LockOwner& owner) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  using Clock = std::chrono::steady_clock;
  for (const Clock::time_point start = Clock::now();; std::this_thread::sleep_for(kLockPause)) {
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return true;
    const int reason = errno;
    owner = lock_owner(fd);
    const Clock::duration wait = owner.gone           ? Clock::duration(kEndingWait)
                                 : owner.text.empty() ? Clock::duration(kOwnerWait)
                                                      : Clock::duration::zero();
    errno = reason;
    if ((reason != EAGAIN && reason != EACCES) || Clock::now() - start >= wait) return false;
  }
}

Error unusable(const std::string& what, const std::string& directory) {
  return Error(Exit::kDoesNotFit, {.area = "RUN-33",
                                   .what = what + ": " + std::strerror(errno),
                                   .place = directory,
                                   .next = "set run.dir to a directory that can be written"});
}

// Only the run directory itself is private: logs show training text. Files in it follow the user's umask, so
// that a model that is moved elsewhere can be read like any other file.
void make_directory(const std::string& directory) {
  errno = make_directories(directory, 0700);
  if (errno != 0) throw unusable("run.dir cannot be created", directory);
}

// Whether `asked` is a number larger than the recorded one ("auto" is none).
bool larger(const KeyDifference& one) {
  double before = 0, after = 0;
  const auto number = [](const std::string& text, double& out) {
    return std::from_chars(text.data(), text.data() + text.size(), out).ec == std::errc();
  };
  return number(one.recorded, before) && number(one.asked, after) && after > before;
}

// Whether the difference trains a finished run further.
bool extends(const KeyDifference& one) {
  return (one.key == "train.steps" || one.key == "train.epochs") && larger(one);
}

bool has_checkpoint(const std::string& directory) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory + "/checkpoints", error)) {
    if (checkpoint_step(entry.path().filename().string()) && fs::exists(entry.path() / kManifestName, error))
      return true;
  }
  return false;
}

bool subtracts_pairs(const Config& config) {
  return trains_adapter(config) && config.lora.start == LoraStart::kPissa;
}

// What PiSSA's frozen pairs are computed from whenever a run is opened: a checkpoint's adapter counts from
// those that it began with.
bool decides_pairs(const std::string& key) {
  constexpr const char* kKeys[] = {"lora.start", "lora.alpha",     "lora.alphas",          "lora.rslora",
                                   "run.seed",   "model.quantize", "model.double_quantize"};
  return std::ranges::find(kKeys, key) != std::end(kKeys);
}

std::string start_over(const std::string& directory) {
  return "give another run.dir=..., or `rm -r " + directory + "` if it is not needed";
}

// How the run can resume with the changed settings; "" if it cannot.
std::string way_on(const std::string& directory, const std::vector<KeyDifference>& differences) {
  std::string flags, fixed;
  for (const KeyDifference& one : differences) {
    flags += " --override " + one.key;
    if (one.tag != KeyTag::kNumerics) fixed += (fixed.empty() ? "" : ", ") + one.key;
  }
  if (!has_checkpoint(directory)) return "";
  if (!fixed.empty()) return "; it cannot resume from its checkpoint with another " + fixed;
  return "; to resume from its checkpoint with the changed settings, add" + flags;
}

// `over`: the run has finished, and should not be extended.
Error other_configuration(const std::string& directory, const std::vector<KeyDifference>& differences,
                          bool over) {
  std::string what =
      std::string("the directory holds a ") + (over ? "finished " : "") + "run of another configuration:";
  for (const KeyDifference& one : differences)
    what += "\n  " + one.key + ": " + one.recorded + " there, " + one.asked + " asked for";
  const std::string next = start_over(directory) + (over ? "" : way_on(directory, differences));
  return incompatible(what + "\n ", directory, next);
}

Error finished(const std::string& directory, int64_t step, bool longer) {
  const std::string what =
      fmt::format("the directory holds this run, finished after step {}{}", step, finished_at(directory));
  if (longer)
    return incompatible(what + ", without a checkpoint to resume from", directory,
                        "train its result further as a new run: model.path=" + directory + " run.dir=...");
  return incompatible(
      what, directory,
      "to train it further give a larger train.steps or train.epochs, else " + start_over(directory));
}

}  // namespace

std::string run_directory(const Config& config, const std::string& config_path) {
  if (!config.run.dir.empty()) return config.run.dir;
  return "runs/" + fs::path(config_path).stem().string();
}

std::vector<KeyDifference> check_run_directory(const std::string& directory, const Config& config,
                                               const ModelSpec& model,
                                               const std::vector<std::string>& overridden) {
  std::error_code error;
  if (!fs::exists(directory, error)) return {};
  if (!fs::is_directory(directory, error)) {
    throw incompatible("run.dir is not a directory", directory, "set run.dir to another path");
  }
  const std::string recorded = directory + "/config.toml";
  if (!fs::exists(recorded, error)) {
    if (only_early_files(directory)) return {};
    throw incompatible("the directory is not empty, and not a run's (it has no config.toml)", directory,
                       "set run.dir to a new directory");
  }
  if (nothing_to_lose(directory)) return {};
  std::vector<KeyDifference> refused;
  bool pairs = false;
  try {
    const Config before = load_config(recorded);
    refused = run_differences(before, config, model);
    pairs = has_checkpoint(directory) && (subtracts_pairs(before) || subtracts_pairs(config));
  } catch (const Error& unreadable) {
    throw incompatible("its config.toml cannot be read: " + std::string(unreadable.what()), directory,
                       "set run.dir to a new directory");
  }
  const std::optional<RunStatus> status = read_status(directory);
  const bool done = status && status->state == "done";
  // A start that failed before its first step has overwritten the status.
  const bool trained = done || fs::is_directory(directory + "/model", error);
  std::vector<KeyDifference> accepted;
  const auto fixed = [&](const KeyDifference& one) { return pairs && decides_pairs(one.key); };
  for (KeyDifference& one : refused)
    if (fixed(one)) one.tag = KeyTag::kState;
  std::erase_if(refused, [&](const KeyDifference& one) {
    const bool wanted = !fixed(one) && std::ranges::find(overridden, one.key) != overridden.end();
    if (wanted || (trained && extends(one))) accepted.push_back(one);
    return wanted || (trained && extends(one));
  });
  const bool longer = std::ranges::any_of(accepted, extends);
  if (trained && longer && !has_checkpoint(directory))
    throw finished(directory, status ? status->step : 0, longer);
  const bool over = done && !longer;
  if (!refused.empty()) throw other_configuration(directory, refused, over);
  if (over) throw finished(directory, status->step, longer);
  return accepted;
}

RunLock::RunLock(const std::string& directory) {
  make_directory(directory);
  const std::string path = directory + "/.lock";
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  if (fd_ < 0) throw unusable("run.dir cannot be written", path);
  if (LockOwner owner; !take_lock(fd_, owner)) {
    const int reason = errno;
    close(std::exchange(fd_, -1));
    errno = reason;
    if (reason != EAGAIN && reason != EACCES) throw unusable("run.dir cannot be locked", path);
    throw Error(Exit::kInUse,
                {.area = "LOCK-30",
                 .what = "the run directory is in use" + (owner.text.empty() ? "" : " by " + owner.text),
                 .place = directory,
                 .next = "wait for that run, stop it (SIGTERM), or set run.dir to another directory",
                 .kept = "that run, undisturbed"});
  }
  taken_over_ = lock_owner(fd_).text;
  const std::string record = owner_record();
  if (ftruncate(fd_, 0) != 0 ||
      pwrite(fd_, record.data(), record.size(), 0) != static_cast<ssize_t>(record.size())) {
    const int reason = errno;
    close(std::exchange(fd_, -1));
    errno = reason;
    throw unusable("run.dir cannot be written", path);
  }
}

void remove_leftovers(const std::string& directory, const RunLock& lock) {
  LM_CHECK(lock.fd() >= 0, directory);
  std::error_code error;
  std::vector<fs::path> gone;
  if (nothing_to_lose(directory)) gone = {directory + "/config.toml", directory + "/" + kNumericsFile};
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (cut_off(entry.path().filename().string())) gone.push_back(entry.path());
  }
  for (const fs::path& path : gone) fs::remove_all(path, error);
}

void tell_end(const std::string& directory, const std::string& job, const RunStatus& status) {
  const int fd = open(ended_path(directory, job).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return;  // another was first, or the directory is out of reach
  const std::string text =
      Json{{"exit_code", status.exit_code.value_or(0)}, {"reason", status.reason}}.dump();
  [[maybe_unused]] const ssize_t written = write(fd, text.data(), text.size());
  close(fd);
}

std::optional<RunStatus> told_end(const std::string& directory, const std::string& job) {
  try {
    const Json json = read_json_file(ended_path(directory, job), {.bytes = 4096, .depth = 4});
    RunStatus out;
    out.state = "failed";
    out.exit_code = json.at("exit_code").get<int>();
    out.reason = json.at("reason").get<std::string>();
    return out;
  } catch (const std::exception&) {
    return std::nullopt;  // not written yet, or being written
  }
}

bool leader_left(const std::string& directory) {
  struct stat info {};
  return stat((directory + "/.lock").c_str(), &info) != 0 || info.st_size == 0;
}

RunLock::RunLock(RunLock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), taken_over_(std::move(other.taken_over_)) {}

void RunLock::release() const {
  struct flock lock {};
  lock.l_type = F_UNLCK;
  lock.l_whence = SEEK_SET;
  fcntl(fd_, F_OFD_SETLK, &lock);
}

// An orderly end removes the record; the file stays (removing it would let two runs lock two files of one
// name).
RunLock::~RunLock() {
  if (fd_ < 0) return;
  [[maybe_unused]] const int ignored = ftruncate(fd_, 0);
  close(fd_);
}

}  // namespace lm
