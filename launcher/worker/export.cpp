#include <fmt/format.h>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/file.h"
#include "base/log.h"
#include "export/export_gguf.h"
#include "export/export_source.h"
#include "export/plain_adapter.h"
#include "kernels/library.h"
#include "launcher/report/card.h"
#include "launcher/worker/adapters.h"
#include "launcher/worker/checkpoint_weights.h"
#include "launcher/worker/job.h"
#include "launcher/worker/merge_check.h"
#include "launcher/worker/run_files.h"
#include "launcher/worker/worker_commands.h"
#include "model/merge.h"

namespace lm {
namespace {

// "" unless --base names another model, whose weights are used unchanged.
std::string take_base(const CommandLine& line, bool merge, Subject& subject) {
  Config& config = subject.config;
  const std::optional<std::string> base = line.value("--base");
  if (!base) return "";
  if (!merge)
    throw usage_error("--base is the model that --merge adds the adapter to",
                      "add --merge, or leave --base out");
  if (config.lora.start == LoraStart::kLoftq)
    throw usage_error(
        "--base: with lora.start = \"loftq\" the adapter compensates for the quantization error, which other "
        "weights do not have",
        "leave --base out: it is merged into the dequantized weights that it was trained on");
  if (config.lora.start == LoraStart::kPissa)  // of a checkpoint: a finished run's files are a plain adapter
    throw usage_error(
        "--base: with lora.start = \"pissa\" a checkpoint's adapter counts from the weights that it was "
        "trained on",
        "export the adapter first, without --merge and --base, and merge that: it is a plain LoRA adapter");
  if (trains_adapter(config)) check_base(subject, *base, "--base");
  config.model.path = *base;
  config.model.quantize = Quantize::kNone;
  return *base;
}

std::optional<GgufType> gguf_type(const CommandLine& line) {
  const std::optional<std::string> word = line.value("--gguf");
  if (!word) return std::nullopt;
  if (*word == "f16") return GgufType::kF16;
  if (*word == "bf16") return GgufType::kBF16;
  if (*word == "q8_0") return GgufType::kQ8_0;
  throw usage_error("--gguf: expected f16, bf16 or q8_0, got \"" + *word + "\"",
                    "see `lmlaunch export --help`");
}

// Checks the request against the subject, before anything is read.
void check_request(const CommandLine& line, const PlannedModel& model) {
  const bool lora = model.adapter.has_value();
  const bool merge = line.has("--merge"), adapter = line.has("--adapter");
  if (merge && model.virtual_tokens() > 0)
    throw usage_error(
        "--merge adds an adapter to the weights; " + line.positional[0] +
            " has virtual tokens, which are part of no weight",
        "leave --merge out: peft reads the adapter; vLLM and llama.cpp read neither a prefix nor "
        "a prompt");
  if (merge && !lora)
    throw usage_error("--merge adds an adapter to the weights; " + line.positional[0] + " has none",
                      "leave --merge out");
  if (adapter && !lora)
    throw usage_error("--adapter: " + line.positional[0] + " has all of its weights trained, and no adapter",
                      "leave --adapter out");
  if (line.has("--patterns") && (!lora || merge))
    throw usage_error("--patterns is a form of an adapter, and this writes a model",
                      lora ? "leave --merge or --patterns out" : "leave --patterns out");
  if (line.has("--each-expert") && (!lora || merge || line.has("--patterns")))
    throw usage_error(
        "--each-expert is a form of an adapter with one rank and alpha",
        lora ? "leave --merge and --patterns out, or --each-expert" : "leave --each-expert out");
  if (adapter && merge)
    throw usage_error("--adapter and --merge exclude each other", "leave one of them out");
  if (model.virtual_tokens() > 0 && line.has("--gguf"))
    throw usage_error("--gguf writes a model, and llama.cpp has no virtual tokens before a text",
                      "leave --gguf out: peft reads the adapter");
  if (lora && !merge && line.has("--gguf"))
    throw usage_error("--gguf writes a model, and " + line.positional[0] + " is an adapter",
                      "add --merge: the adapter is merged into the weights that it was trained on");
}

// The weights that an adapter was trained on, for messages.
std::string base_text(const PlannedModel& model) {
  for (const BlockLayout& block : model.layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (place.encoded()) return std::string("dequantized weights (") + place.encoding().name + ")";
    }
  }
  return "the weights of " + model.directory;
}

ExportFiles files_of(const Subject& subject, const Job& job, DType stored, const Merge& merge) {
  const bool lora = job.model.adapter.has_value(), trained = !subject.trained.empty();
  const bool fresh = job.config.model.init == ModelInit::kRandom;
  return {.spec = job.model.spec,
          .layout = job.model.layout,
          .model = !lora && trained ? subject.trained
                   : fresh          ? ""
                                    : job.model.directory,
          .seed = job.config.run.seed,
          .adapter = lora ? subject.trained : "",
          .threads = job.plan.numerics.threads,
          .merge = merge,
          .quantized_from = stored};
}

void write_gguf(const Job& job, const WeightSource& source, const std::string& output, GgufType type) {
  const std::string path = std::filesystem::path(job.config.model.path).lexically_normal().filename();
  export_gguf(output, job.model.spec, job.model.layout, source,
              {.type = type,
               .name = path.empty() ? job.model.spec.model_type : path,
               .tokenizer_dir = job.model.directory,
               .chat_template = job.chat_template});
}

// What is merged is the job's adapter or, once it has a value, `plain`.
Merge merge_of(const Job& job, const std::optional<PlainAdapter>& plain) {
  return [&](size_t block, const TensorPlace& place, const std::byte* adapter, std::byte* weight) {
    const MergeTarget target{plain ? plain->block(block) : adapter, weight, job.stream.threads,
                             library_kernels(DeviceType::kCpu)};
    if (!plain) return merge_adapters(job.model.layout.blocks[block], place, *job.model.adapter, target);
    const BlockLayout& layout = plain->layout().blocks[block];
    merge_adapters(layout, *layout.find(place.parameter.name), plain->spec(), target);
  };
}

std::string compared(const MergeCheck& check) {
  return fmt::format(
      "read again: its logits differ by at most {:.2g} from those of the model with its adapter (the largest "
      "is {:.3g})",
      check.difference, check.largest);
}

// Compares the merged model with the adapter, and prints where the output is.
void report(const CommandLine& line, const Subject& subject, const std::string& output, const Job& job,
            const std::string& into, DType stored) {
  const bool merge = line.has("--merge"), compare = merge && !line.has("--gguf");
  const MergeCheck check = compare ? check_merged(subject, output, stored, line) : MergeCheck();
  if (line.has("--json")) {
    nlohmann::ordered_json out{{"directory", output}, {"merged", merge}};
    if (merge) out["base"] = into.empty() ? base_text(job.model) : into;
    if (compare && check.skipped.empty()) out["logits_differ_by"] = check.difference;
    std::printf("%s\n", out.dump().c_str());
    return;
  }
  if (merge) log_line("merged into " + (into.empty() ? base_text(job.model) : "the weights of " + into));
  if (compare && !check.skipped.empty())
    log_note("FILE-27", "the merged model is not compared with the adapter's: " + check.skipped);
  if (compare && check.skipped.empty()) log_line(compared(check));
  std::printf("%s\n", output.c_str());
}

}  // namespace

Exit export_command(const CommandLine& line) {
  const std::optional<std::string> output = line.value("-o");
  if (!output) throw usage_error("export needs -o DIR", "lmlaunch export " + line.positional[0] + " -o DIR");
  const std::optional<GgufType> gguf = gguf_type(line);
  Subject subject = open_subject(line.positional[0]);
  const DType dtype = storage_type(subject.config.model.dtype);
  // In fp32 nothing is lost before the single rounding of the export: an adapter is stored in fp32, and W + s
  // B A is computed in it.
  subject.config.model.dtype = ModelDType::kF32;
  const bool merge = line.has("--merge");
  const std::string into = take_base(line, merge, subject);
  const std::unique_ptr<Job> job = open_job(subject.config, line, PlanPurpose::kExport);
  job->chat_template = own_template(subject);
  const PlannedModel& model = job->model;
  const bool lora = model.adapter.has_value();
  check_request(line, model);
  if (gguf) check_gguf(model.spec, *output);
  std::optional<PlainAdapter> plain;  // of an adapter with PiSSA's start
  const Merge merged = merge ? merge_of(*job, plain) : Merge();
  std::optional<CheckpointWeights> checkpoint;
  std::optional<FileSource> files;
  if (subject.checkpoint) {
    checkpoint.emplace(*job, subject.trained, dtype, merged);
  } else {
    files.emplace(files_of(subject, *job, dtype, merged));
  }
  const WeightSource view =
      checkpoint ? checkpoint->source() : [&files](size_t block, const TensorPlace& place, int64_t row) {
        return files->view(block, place, row);
      };
  if (merge && model.adapter->pissa)
    plain.emplace(model.spec, *model.adapter, model.layout, view, principal_pairs(*job, dtype));
  if (gguf) {
    write_gguf(*job, view, *output, *gguf);
  } else {
    write_export(*job, view,
                 {.output = *output,
                  .dtype = dtype,
                  .adapter = lora && !merge,
                  .replace = false,
                  .patterns = line.has("--patterns"),
                  .each_expert = line.has("--each-expert")});
    if (!subject.run.empty()) write_model_card(*output, subject.run, lora && !merge);
  }
  report(line, subject, *output, *job, into, dtype);
  return Exit::kDone;
}

}  // namespace lm
