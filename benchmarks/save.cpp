// Our side of save.py: steps with and without a save, and loads, of a model with random weights.
//
//   bench_save SHAPE_JSON THREADS SEQUENCES LENGTH DIRECTORY [KEY=VALUE ...]
//
// KEY=VALUE are settings of the configuration. Checkpoints go to DIRECTORY, which must be there. Prints
// "ready", then answers each line of input with a JSON line:
//   step   {ms, read_bytes, written_bytes}
//   save   the same of a step with a save of the state before it, and {saved_bytes, compute_ms, commit_ms,
//   file}:
//          the compute thread's part, and from the step's end to the commit
//   load   {ms, bytes}: the last save, into the rank
//   probe  {read, write, both}: of the directory's disk, bytes/s
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "config/config_toml.h"
#include "offload/disk_probe.h"
#include "synthetic_run.h"

namespace {

using namespace lm;
using Row = nlohmann::json;

class Bench {
 public:
  Bench(SyntheticRun& run, std::string directory, bool copies)
      : run_(run), directory_(std::move(directory)), catalogue_(run.rank().catalogue()), copies_(copies) {}

  Row answer(const std::string& command) {
    if (command == "save") return save();
    if (command == "load") return load();
    if (command == "probe") return probe();
    return step(monotonic_seconds());
  }

 private:
  Row step(double start) {
    const IoCounters before = run_.rank().off_device().counters();
    run_.step();
    ++steps_;
    const double ms = (monotonic_seconds() - start) * 1e3;
    const IoCounters now = run_.rank().off_device().counters();
    return {{"ms", ms},
            {"read_bytes", now.read_bytes - before.read_bytes},
            {"written_bytes", now.written_bytes - before.written_bytes}};
  }

  Row save() {
    const double start = monotonic_seconds();
    Save save({.directory = directory_,
               .step = steps_,
               .catalogue = catalogue_,
               .copies = copies_,
               .buffers = &buffers_});
    Manifest manifest;
    manifest.step = steps_;
    const std::unique_ptr<StepSave> riding = run_.rank().step().begin_save(
        {.catalogue = catalogue_, .sink = save, .complete = [&] { newest_ = save.commit(manifest); }});
    Row row = step(start);
    const double end = monotonic_seconds();
    riding->finish();
    run_.rank().step().end_save();
    row["commit_ms"] = (monotonic_seconds() - end) * 1e3;
    row["compute_ms"] = riding->compute_seconds() * 1e3;
    const CheckpointFile file = read_manifest(newest_).files.front();
    row["saved_bytes"] = file.bytes;
    row["file"] = newest_ + "/" + file.name;
    retain_checkpoints(directory_, 1, steps_ - 1, {});
    return row;
  }

  Row load() {
    const double start = monotonic_seconds();
    CheckpointReader reader(newest_, run_.plan().numerics.threads);
    run_.rank().restore(reader, reader.manifest().numbers.at("optimizer.t"));
    return {{"ms", (monotonic_seconds() - start) * 1e3}, {"bytes", reader.manifest().bytes()}};
  }

  Row probe() {
    const DiskProbe disk = probe_disk(directory_);
    return {
        {"read", disk.read_bytes_per_s}, {"write", disk.write_bytes_per_s}, {"both", disk.both_bytes_per_s}};
  }

  SyntheticRun& run_;
  std::string directory_, newest_;
  StateCatalogue catalogue_;
  bool copies_;
  std::unique_ptr<PinnedPool> buffers_;
  int64_t steps_ = 0;
};

void run(int argc, char** argv) {
  const ModelSpec spec = parse_model_spec(argv[1], "the command line");
  const std::vector<std::string> settings(argv + 6, argv + argc);
  Config config =
      parse_config("[model]\npath = \"none\"\n[data]\ntrain = [\"none\"]\n", "benchmark", settings);
  config.run.threads = std::stoll(argv[2]);
  config.train.global_batch = config.train.micro_batch.emplace(std::stoll(argv[3]));
  config.data.max_length = std::stoll(argv[4]);
  const StreamView stream = start_torch(DeviceType::kCpu, static_cast<int>(*config.run.threads), true,
                                        planned_gemm_shapes(spec, false, config));
  Machine machine = roomy_machine(static_cast<int>(*config.run.threads));
  for (const std::string& path : config.offload.paths) {
    const DiskProbe probe = probe_disk(path);
    machine.disks.push_back({path, probe.free_bytes, probe.read_bytes_per_s, probe.write_bytes_per_s});
  }
  SyntheticRun training({.spec = spec, .config = config}, machine, stream);
  Bench bench(training, argv[5], save_copies(training.plan().placement, config.optimizer.clip));
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::printf("%s\n", bench.answer(line).dump().c_str());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::fprintf(stderr, "usage: bench_save SHAPE_JSON THREADS SEQUENCES LENGTH DIRECTORY [KEY=VALUE ...]\n");
    return 2;
  }
  try {
    run(argc, argv);
    return 0;
  } catch (const lm::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  }
}
