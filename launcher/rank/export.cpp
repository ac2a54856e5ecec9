#include <cstdio>
#include <nlohmann/json.hpp>

#include "checkpoint/trained_values.h"
#include "kernels/library.h"
#include "launcher/rank/job.h"
#include "launcher/rank/rank_commands.h"
#include "launcher/rank/run_files.h"
#include "model/merge.h"
#include "weights/export_source.h"

namespace lm {

Exit export_command(const CommandLine& line) {
  const std::optional<std::string> output = line.value("-o");
  if (!output) {
    throw Error(Exit::kUsage, {.area = "USE-20",
                               .what = "export needs -o DIR",
                               .place = "the command line",
                               .next = "lmlaunch export " + line.positional[0] + " -o DIR",
                               .kept = ""});
  }
  Subject subject = open_subject(line.positional[0]);
  const DType dtype = subject.config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  // In fp32 nothing is lost before the one rounding of the export: an adapter is stored in fp32, and W + s B
  // A is formed in it.
  subject.config.model.dtype = ModelDType::kF32;
  const std::unique_ptr<Job> job = open_job(subject.config, line, PlanPurpose::kExport);
  const PlannedModel& model = job->model;
  const bool lora = model.adapter.has_value(), merge = line.has("--merge");
  if (merge && !lora) {
    throw Error(Exit::kUsage, {.area = "USE-20",
                               .what = "--merge adds an adapter into the weights; this run has none",
                               .place = line.positional[0],
                               .next = "leave --merge out",
                               .kept = ""});
  }
  const bool trained = !subject.trained.empty(), fresh = job->config.model.init == ModelInit::kRandom;
  ExportFiles files{.spec = model.spec,
                    .layout = model.layout,
                    .model = !lora && trained ? subject.trained
                             : fresh          ? ""
                                              : model.directory,
                    .seed = job->config.run.seed,
                    .adapter = lora ? subject.trained : "",
                    .threads = job->plan.numerics.threads};
  if (merge) {
    files.merge = [&](size_t block, const TensorPlace& place, const std::byte* adapter, std::byte* weight) {
      merge_adapters(model.layout.blocks[block], place, *model.adapter,
                     {adapter, weight, DType::kF32, job->stream, library_kernels(DeviceType::kCpu)});
    };
  }
  std::optional<CheckpointReader> checkpoint;
  if (subject.checkpoint) {
    checkpoint.emplace(subject.trained, files.threads);
    files.adapter = "";
    files.model = lora ? model.directory : "";
    files.trained = [&](size_t block, int64_t first, int64_t elements, float* out) {
      TrainedValues(*checkpoint, lora).read(static_cast<int64_t>(block), first, elements, out);
    };
  }
  FileSource source(files);
  write_export(*job,
               [&source](size_t block, const TensorPlace& place, int64_t row) {
                 return source.view(block, place, row);
               },
               {.output = *output, .dtype = dtype, .adapter = lora && !merge});
  if (line.has("--json")) {
    std::printf("%s\n", nlohmann::ordered_json{{"directory", *output}, {"merged", merge}}.dump().c_str());
  } else {
    std::printf("%s\n", output->c_str());
  }
  return Exit::kDone;
}

}  // namespace lm
