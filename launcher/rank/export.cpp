#include <cstdio>
#include <nlohmann/json.hpp>

#include "launcher/rank/job.h"
#include "launcher/rank/rank_commands.h"
#include "launcher/rank/run_files.h"

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
  const std::unique_ptr<Job> job = open_job(subject.config, line, Purpose::kEvaluate);
  const bool merge = line.has("--merge");
  if (merge && !job->model.adapter) {
    throw Error(Exit::kUsage, {.area = "USE-20",
                               .what = "--merge adds an adapter into the weights; this run has none",
                               .place = line.positional[0],
                               .next = "leave --merge out",
                               .kept = ""});
  }
  const std::unique_ptr<Rank> rank = make_rank(*job, false);
  load_rank(*job, *rank, subject.trained);
  export_rank(*job, *rank, *output, dtype, merge, false);
  if (line.has("--json")) {
    std::printf("%s\n", nlohmann::ordered_json{{"directory", *output}, {"merged", merge}}.dump().c_str());
  } else {
    std::printf("%s\n", output->c_str());
  }
  return Exit::kDone;
}

}  // namespace lm
