#include "launcher/worker/checkpoints.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/log.h"
#include "checkpoint/save.h"
#include "config/config_names.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "launcher/recorded.h"
#include "launcher/worker/run_files.h"
#include "offload/io_failure.h"
#include "weights/model_files.h"
#include "weights/verify.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFailuresInRow = 3;
// Assumed before the first save: what a common disk writes.
constexpr double kBytesPerSecond = 500e6;

Error incompatible(const std::string& what, const std::string& place, const std::string& next) {
  return Error(
      Exit::kIncompatible,
      {.area = "CKPT-26", .what = what, .place = place, .next = next, .kept = "the checkpoints, untouched"});
}

// Renames a checkpoint, so that no start uses it and nothing is lost. Throws if that fails: the next start
// would resume from what this run has rejected.
void set_aside(const std::string& path, const char* why) {
  std::error_code error;
  std::string name = path + "." + why;
  for (int i = 1; fs::exists(fs::symlink_status(name, error)); ++i)
    name = path + "." + why + std::to_string(i);
  fs::rename(path, name, error);
  if (error) throw disk_error(error.value(), "cannot set the checkpoint aside", path);
  log_note("CKPT-02", path + " is now " + fs::path(name).filename().string() + "; delete it if you like");
}

// Length of metrics.jsonl when the checkpoint was saved; 0 if the manifest does not have it.
int64_t metrics_bytes(const Manifest& manifest) {
  const auto found = manifest.run.find("metrics_bytes");
  return found == manifest.run.end() || !found->is_number_integer()
             ? 0
             : std::max<int64_t>(json_integer(*found), 0);
}

std::string tokenizer_hash(const std::string& model) {
  const std::string path = model + "/tokenizer.json";
  std::error_code error;
  return fs::exists(path, error) ? hash_text(read_small_file(path, int64_t{1} << 28)) : "";
}

std::string copies_of(const CheckpointConfig& config, const std::string& run_directory) {
  const std::string mirror = mirror_of(config, run_directory);
  return mirror.empty() ? "" : mirror + "/checkpoints";
}

// Those in `directory`, and of those in `copies` ("": none) the ones that it does not have; newest first.
std::vector<FoundCheckpoint> find_with_copies(const std::string& directory, const std::string& copies) {
  std::vector<FoundCheckpoint> out = find_checkpoints(directory);
  if (copies.empty()) return out;
  try {
    for (FoundCheckpoint& copy : find_checkpoints(copies)) {
      const bool has = std::ranges::any_of(
          out, [&](const FoundCheckpoint& own) { return own.step == copy.step && own.manifest; });
      if (!has) out.push_back(std::move(copy));
    }
  } catch (const Error& error) {
    log_warning("MIRR-41", std::string("the mirror cannot be read: ") + error.what());
  }
  std::ranges::stable_sort(out, std::greater(), &FoundCheckpoint::step);
  return out;
}

void remove_interrupted(const std::string& directory) {
  for (const std::string& name : interrupted_saves(directory)) {
    std::error_code error;
    fs::remove_all(directory + "/" + name, error);
    log_note("CKPT-01", "removed the incomplete " + name + ": its save was interrupted");
  }
}

}  // namespace

std::vector<FoundCheckpoint> resumable_checkpoints(const Config& config, const std::string& run_directory) {
  const std::string directory = run_directory + "/checkpoints", &resume = config.checkpoint.resume;
  remove_interrupted(directory);
  std::vector<FoundCheckpoint> found =
      find_with_copies(directory, copies_of(config.checkpoint, run_directory));
  if (resume == "never") {
    if (found.empty()) return {};
    throw incompatible(fmt::format("checkpoint.resume = \"never\", and this run has {} checkpoints, which a "
                                   "fresh start would replace",
                                   found.size()),
                       directory, "leave checkpoint.resume out to resume, or give another run.dir=...");
  }
  const std::optional<int64_t> wanted = checkpoint_step(resume);
  std::string all;
  std::vector<FoundCheckpoint> out;
  for (FoundCheckpoint& one : found) {
    all += "\n  " + fs::path(one.path).filename().string() + ": " + (one.manifest ? "valid" : one.problem);
    if (!one.manifest) {
      log_warning("CKPT-02", one.path + " cannot be used: " + one.problem);
    } else if (!wanted || one.step == *wanted) {
      out.push_back(std::move(one));
    }
  }
  if (!out.empty() || (found.empty() && !wanted)) return out;
  throw incompatible(
      (wanted ? "there is no valid checkpoint " + resume + "; there are:" : "no checkpoint is valid:") + all +
          "\n ",
      directory,
      wanted ? "name one of them" : "delete the directory to start again, or restore it from a copy");
}

struct Checkpoints::Pending {
  Pending(Rank& rank_at_work, int64_t step_done)
      : rank(rank_at_work), step(step_done), start(monotonic_seconds()), catalogue(rank.catalogue()) {}
  ~Pending() { rank.step().end_save(); }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  Rank& rank;
  int64_t step;
  double start, begun = 0;  // monotonic: at the beginning, and without what `state` counts itself
  StateCatalogue catalogue;
  Manifest manifest;
  std::vector<int64_t> kept;  // besides the newest checkpoint.keep
  std::optional<Save> save;
  // Written by the save's thread until it has ended.
  std::string path;
  double committed = 0;  // monotonic
  std::unique_ptr<StepSave> state;
};

Checkpoints::~Checkpoints() = default;

Checkpoints::Checkpoints(const Job& job, std::string run_directory, int lock, Group& group)
    : job_(job),
      run_(std::move(run_directory)),
      directory_(run_ + "/checkpoints"),
      lock_(lock),
      group_(group),
      saved_at_(monotonic_seconds()) {
  const CheckpointConfig& config = job.config.checkpoint;
  copies_ = copies_of(config, run_);
  if (copies_.empty() || !leads()) return;
  mirror_ = std::make_unique<Mirror>(MirrorSetup{.run = run_,
                                                 .directory = mirror_of(config, run_),
                                                 .files = {kMirroredFiles.begin(), kMirroredFiles.end()},
                                                 .keep = config.keep});
}

const std::string& Checkpoints::base_hash() {
  const bool fresh = job_.config.model.init == ModelInit::kRandom;
  if (!base_hash_) base_hash_ = fresh ? "" : weights_hash(ModelFiles(job_.model.directory));
  return *base_hash_;
}

int64_t Checkpoints::restore(const std::vector<FoundCheckpoint>& found, Rank& rank, Trainer& trainer) {
  std::string all;
  for (const FoundCheckpoint& one : found) {
    try {
      together(group_, "loading a checkpoint", [&] { restore_from(one, rank, trainer); });
      newest_ = one.path;
      newest_step_ = one.step;
      log_line(fmt::format("resumes from {}: step {}", one.path, one.step));
      together(group_, "setting checkpoints aside", [&] {
        if (leads()) leave_behind(one.step, trainer.state());
      });
      // A copy may have been interrupted by the end of the last start.
      std::error_code error;
      if (mirror_ && !fs::exists(copies_ + "/" + checkpoint_name(one.step), error))
        mirror_->add(one.path, one.step, kept(trainer.state()));
      return metrics_bytes(*one.manifest);
    } catch (const Error& error) {
      if (error.code() != Exit::kIntegrity && error.code() != Exit::kIo) throw;
      all += "\n  " + error.text().what + " at " + error.text().place;
      log_warning("CKPT-02", one.path + " fails verification: " + error.what());
      if (leads()) set_aside(one.path, "damaged");
    }
  }
  throw incompatible("no checkpoint is valid:" + all + "\n ", directory_, "start again in another run.dir");
}

// A run that dies again and again soon after its saves would otherwise never delete a checkpoint.
void Checkpoints::leave_behind(int64_t step, const TrainerState& state) const {
  for (const std::string& directory : {directory_, copies_}) {
    if (directory.empty()) continue;
    for (const FoundCheckpoint& later : find_checkpoints(directory))
      if (later.step > step) set_aside(later.path, later.manifest ? "later" : "damaged");
  }
  retain_checkpoints(directory_, job_.config.checkpoint.keep, step, kept(state));
}

// Checkpoints that are kept besides the newest checkpoint.keep.
std::vector<int64_t> Checkpoints::kept(const TrainerState& state) const {
  const bool best = job_.config.checkpoint.keep_best && state.best_eval;
  return best ? std::vector<int64_t>{state.best_step} : std::vector<int64_t>();
}

void Checkpoints::restore_from(const FoundCheckpoint& one, Rank& rank, Trainer& trainer) {
  CheckpointReader reader(one.path, job_.plan.numerics.threads);
  const Manifest& manifest = reader.manifest();
  const std::string base = manifest.sources.value("base", "");
  // Full fine-tuning does not need the base: its checkpoints have all weights.
  if (job_.model.adapter && base != base_hash()) {
    throw Error(Exit::kInput,
                {.area = "DATA-24",
                 .what = "the base model is not the one that the checkpoint's adapter was trained on: its "
                         "weights' hash is " +
                         base_hash() + ", " + base + " was recorded",
                 .place = job_.model.directory,
                 .next = "put the base model back, or start in another run.dir",
                 .kept = "the checkpoints"});
  }
  // State of another optimizer may have the same length and another meaning.
  const Json numerics = Json::parse(numerics_json(job_.plan.numerics));
  for (const char* key : {"optimizer", "master"}) {
    const std::string saved = manifest.numerics.value(key, ""), now = numerics.at(key);
    if (saved != now)
      throw incompatible(std::string("the checkpoint's state is of optimizer.") +
                             (key == std::string("optimizer") ? "name" : key) + " = " + saved + ", not of " +
                             now,
                         one.path, "start with " + saved + ", or in another run.dir");
  }
  const auto updates = manifest.numbers.find("optimizer.t");
  if (updates == manifest.numbers.end())
    throw incompatible("the checkpoint has no optimizer.t", one.path, "");
  const TrainerState state = parse_trainer_state(manifest.run.value("trainer", Json()), one.path);
  rank.restore(reader, updates->second);
  trainer.restore(state);
}

int64_t Checkpoints::go_back(Rank& rank, Trainer& trainer) {
  std::vector<FoundCheckpoint> found = find_with_copies(directory_, copies_);
  std::erase_if(found, [](const FoundCheckpoint& one) { return !one.manifest; });
  return restore(found, rank, trainer);
}

std::string Checkpoints::take_best(Rank& rank, const Trainer& trainer) {
  complete();
  if (!job_.config.checkpoint.keep_best) return "";
  for (const FoundCheckpoint& one : find_with_copies(directory_, copies_)) {
    if (one.step != trainer.state().best_step || !one.manifest) continue;
    CheckpointReader reader(one.path, job_.plan.numerics.threads);
    try {  // before the trained state is overwritten
      together(group_, "verifying a checkpoint", [&] { reader.verify(); });
    } catch (const Error& error) {
      if (error.code() != Exit::kIntegrity && error.code() != Exit::kIo) throw;
      log_warning("CKPT-02",
                  one.path + " fails verification, the last step's model is kept: " + error.what());
      try {
        if (leads()) set_aside(one.path, "damaged");
      } catch (const Error& stays) {
        log_warning(stays.text().area, stays.what());
      }
      return "";
    }
    together(group_, "loading a checkpoint",
             [&] { rank.restore(reader, reader.manifest().numbers.at("optimizer.t")); });
    return one.path;
  }
  return "";
}

bool Checkpoints::due(const Trainer& trainer, bool best) {
  const CheckpointConfig& config = job_.config.checkpoint;
  if (best && config.keep_best) return true;
  if (config.every.seconds > 0)
    // Rank 0's clock decides.
    return group_.gather("save's time", seconds_since_save()).front() >=
           static_cast<double>(config.every.seconds);
  return config.every.steps > 0 && trainer.steps() % config.every.steps == 0;
}

double Checkpoints::seconds_since_save() const {
  return monotonic_seconds() - saved_at_;
}

Manifest Checkpoints::about(const Trainer& trainer, int64_t metrics_bytes) {
  Manifest out;
  out.step = trainer.steps();
  const TrainerState state = trainer.state();
  out.run = {{"trainer", state_json(state)}, {"metrics_bytes", metrics_bytes}};
  out.numerics = Json::parse(numerics_json(job_.plan.recorded_numerics()));
  std::string keys;
  for (const KeyText& key : list_keys(resolved_config(job_, run_))) {
    if (!changes_results(key.tag)) continue;
    out.config["keys"][key.table + "." + key.name] = key.value;
    keys += key.table + "." + key.name + " = " + key.value + "\n";
  }
  out.config["hash"] = hash_text(keys);
  out.sources = {{"tokenizer", tokenizer_hash(job_.model.directory)},
                 {"data", state.data.fingerprint},
                 {"lmlaunch", LM_VERSION}};
  out.tensors = trained_tensors(job_.model.layout);
  return out;
}

// Another process may have taken the directory over while this one was stopped, or the directory may be gone.
void Checkpoints::check_lock() const {
  struct stat held {
  }, named{};
  if (lock_ < 0 || (fstat(lock_, &held) == 0 && stat((run_ + "/.lock").c_str(), &named) == 0 &&
                    held.st_ino == named.st_ino && held.st_dev == named.st_dev))
    return;
  throw Error(Exit::kInUse, {.area = "LOCK-30",
                             .what = "the run directory's lock is no longer this run's",
                             .place = run_,
                             .next = "start again in another run.dir",
                             .kept = "the checkpoints that were committed"});
}

bool Checkpoints::fails(int64_t step, const std::function<void()>& body) {
  try {
    body();
    return false;
  } catch (const Error& error) {
    const bool disk = error.code() == Exit::kNoSpace || error.code() == Exit::kIo;
    if (!disk) throw;
    ErrorText text = error.text();
    text.what = fmt::format("the checkpoint of step {} cannot be saved: {}", step, text.what);
    text.otherwise = "set run.dir to a directory on another disk";
    text.kept = newest_.empty() ? "" : newest_;
    if (required_ || ++failures_ >= kFailuresInRow) throw Error(error.code(), text);
    log_warning("CKPT-03", text.what + "; training continues, and the next save that is due tries again");
    return true;
  }
}

void Checkpoints::begin(Rank& rank, const Trainer& trainer, MetricsFile& metrics) {
  complete();
  if (trainer.steps() == newest_step_ && !newest_.empty()) return;
  saved_at_ = monotonic_seconds();
  fails(trainer.steps(), [&] {
    auto pending = std::make_unique<Pending>(rank, trainer.steps());
    seconds_ =
        std::max(seconds_, static_cast<double>(checkpoint_bytes(pending->catalogue)) / kBytesPerSecond);
    together(group_, "a checkpoint's manifest", [&] {
      if (leads()) pending->manifest = about(trainer, metrics.sync());
    });
    pending->kept = kept(trainer.state());
    pending->save.emplace(SaveSetup{.directory = directory_,
                                    .step = pending->step,
                                    .catalogue = pending->catalogue,
                                    .group = &group_,
                                    .copies = save_copies(job_.plan.placement, job_.config.optimizer.clip),
                                    .buffers = &buffers_,
                                    .engine = engine_kind(name_of(job_.plan.placement.engine))});
    Pending& p = *pending;
    together(group_, "saving state", [&] {
      p.state = rank.step().begin_save({.catalogue = p.catalogue, .sink = *p.save, .complete = [this, &p] {
                                          if (alone()) commit(p);
                                        }});
    });
    p.begun = monotonic_seconds() - p.state->compute_seconds();
    pending_ = std::move(pending);
  });
}

void Checkpoints::commit(Pending& p) {
  if (leads()) p.manifest.sources["base"] = base_hash();
  p.path = p.save->commit(std::move(p.manifest), [this] { check_lock(); });
  p.committed = monotonic_seconds();
}

void Checkpoints::committed(int64_t step, const std::string& path, const std::vector<int64_t>& kept) {
  failures_ = 0;
  newest_ = path;
  newest_step_ = step;
  if (!leads()) return;
  std::vector<int64_t> stay = kept;
  if (mirror_) {
    mirror_->add(path, step, kept);
    for (const int64_t copied : mirror_->in_use()) stay.push_back(copied);
  }
  retain_checkpoints(directory_, job_.config.checkpoint.keep, newest_step_, stay);
}

void Checkpoints::wait_for_mirror() const {
  if (!mirror_) return;
  const double begin = monotonic_seconds();
  bool told = false;
  mirror_->wait([&] {
    if (told || monotonic_seconds() - begin < 1) return;
    log_line("waiting for the mirror's copy of the last checkpoint");
    told = true;
  });
}

void Checkpoints::settle() {
  if (!pending_ || pending_->state->needs_step()) return;
  if (!alone()) return end();
  if (job_.config.checkpoint.every.steps > 0) pending_->state->wait();
}

void Checkpoints::poll() {
  if (pending_ && alone() && pending_->state->ended()) end();
}

void Checkpoints::complete() {
  if (!pending_) return;
  // A failed save needs no step. With several ranks it may have failed on one alone, so all flush.
  if (!alone() || pending_->state->needs_step()) pending_->rank.step().flush();
  end();
}

void Checkpoints::save(Rank& rank, const Trainer& trainer, MetricsFile& metrics) {
  if (pending_ && pending_->step != trainer.steps()) complete();
  required_ = true;
  begin(rank, trainer, metrics);
  complete();
  required_ = false;
}

void Checkpoints::finish(Rank& rank, const Trainer& trainer, MetricsFile& metrics) {
  const CheckpointConfig& config = job_.config.checkpoint;
  const bool wanted = config.every.steps > 0 || config.every.seconds > 0;
  failures_ = 0;  // a full disk must not end the run before the model is written
  if (wanted && trainer.steps() > 0) begin(rank, trainer, metrics);
  complete();
}

void Checkpoints::give_up() {
  // With several ranks, the others may be in the middle of a step.
  if (!pending_ || !alone() || pending_->state->needs_step()) return pending_.reset();
  try {
    end();
  } catch (const Error& error) {
    log_warning(error.text().area, error.what());
  }
}

// Ends a save that has all its bytes, or has failed.
void Checkpoints::end() {
  std::unique_ptr<Pending> done;
  const bool failed = fails(pending_->step, [&] {
    std::unique_ptr<Pending> over =
        std::move(pending_);  // a failed save is destroyed before its error is reported
    together(group_, "saving state", [&] { over->state->finish(); });
    if (!alone()) commit(*over);
    done = std::move(over);
  });
  if (failed) return;
  seconds_ = done->committed - done->start;
  const double waited = done->begun - done->start + done->state->compute_seconds();
  log_fields(
      fmt::format("COMMITTED step {} ({:.2f} s; training waited {:.2f} s)", done->step, seconds_, waited),
      {{"step", done->step}, {"checkpoint", done->path}, {"seconds", seconds_}});
  committed(done->step, done->path, done->kept);
}

}  // namespace lm
