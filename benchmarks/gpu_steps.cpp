// What does a step cost on this GPU, and does the plan know? Rows of Llama-3.2-1B's, Llama-2-7B's and
// Llama-3.1-8B's shapes: tokens/s, share of the speed of light (dense peak of the data sheet), step time and
// GPU memory as planned and as measured. A slice has the model's true width and a few of its layers, so that
// it starts in seconds. Weights repeat one tile that is made on the device (gpu_pattern.h): losses mean
// nothing, but rows of one model begin with one loss, wherever its weights lie. A step lasts from one check
// of loss and norm to the next, as in a run. Resident, with state in host memory stepped by the GPU and by
// the CPU, and on disk where a directory is named. Medians of the timed steps; prints a table, JSON lines and
// a last line with the figure.
//
//   bench_gpu_steps [--path DIR] [--steps 5] [--trace DIR] [ROW...]
//
// ROW: by name, or NAME* for all that begin so; none: the slices. --trace: steps 3 and 4 of each row as
// DIR/ROW.json, for ui.perfetto.dev.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/trace.h"
#include "config/config_toml.h"
#include "launcher/machine/gpu_meter.h"
#include "offload/copy_probe.h"
#include "synthetic_run.h"

namespace {

using namespace lm;

constexpr const char* kLlama1B =
    R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":2048,"intermediate_size":8192,
"num_hidden_layers":16,"num_attention_heads":32,"num_key_value_heads":8,"head_dim":64,"vocab_size":128256,
"max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"tie_word_embeddings":true})";
constexpr const char* kLlama8B =
    R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":4096,"intermediate_size":14336,
"num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"head_dim":128,"vocab_size":128256,
"max_position_embeddings":131072,"rms_norm_eps":1e-5,"rope_theta":500000.0,"tie_word_embeddings":false})";

constexpr const char* kLlama7B =
    R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":4096,"intermediate_size":11008,
"num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":32,"head_dim":128,"vocab_size":32000,
"max_position_embeddings":4096,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":false})";
constexpr const char* kTiny =
    R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":64,"intermediate_size":96,
"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"vocab_size":320,
"max_position_embeddings":4096,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":false})";

struct Row {
  const char* name;
  const char* shape;
  int64_t layers;  // of the shape's; 0: all
  bool lora;
  std::vector<std::string> settings;
  std::optional<bool> update_on_host = {};  // none: as planned
  bool disk = false;
  int64_t length = 2048;  // tokens of a sequence
};

// Slices first: what runs when nothing is named. `tiny` only shows that this program works.
std::vector<Row> rows() {
  const std::string b8 = "train.global_batch=8", bf16 = "train.gradients=\"bf16\"",
                    host = "offload.optimizer=\"host\"";
  const std::vector<std::string> tiny = {"train.global_batch=2", bf16};
  return {
      {"1b-slice", kLlama1B, 4, false, {b8, bf16}},
      {"1b-slice-fp32-gradients", kLlama1B, 4, false, {b8}},
      {"1b-slice-lora", kLlama1B, 4, true, {b8}},
      {"1b-slice-host-by-gpu", kLlama1B, 4, false, {b8, bf16, host}, false},
      {"1b-slice-host-by-cpu", kLlama1B, 4, false, {b8, bf16, host}, true},
      {"1b-slice-all-on-host", kLlama1B, 4, false, {b8, bf16, host, "offload.weights=\"host\""}, false},
      {"7b-slice", kLlama7B, 3, false, {b8, bf16}},
      {"7b-slice-lora", kLlama7B, 3, true, {b8}},
      {"8b-slice", kLlama8B, 3, false, {b8, bf16}},
      {"8b-slice-lora", kLlama8B, 3, true, {b8}},
      {"8b-slice-lora-norms-again", kLlama8B, 3, true, {b8, "train.recompute=\"none\""}},  // not kept
      {"8b-slice-host", kLlama8B, 3, false, {b8, bf16, host}},
      {"1b", kLlama1B, 0, false, {b8, bf16}},
      {"1b-host", kLlama1B, 0, false, {b8, bf16, host}},
      {"1b-lora", kLlama1B, 0, true, {b8}},
      {"7b-lora", kLlama7B, 0, true, {b8}},
      {"7b", kLlama7B, 0, false, {"train.global_batch=32", bf16}},
      {"8b", kLlama8B, 0, false, {b8, bf16}},
      {"8b-lora", kLlama8B, 0, true, {b8}},
      {"8b-lora-4k", kLlama8B, 0, true, {"train.global_batch=2"}, {}, false, 4096},
      {"8b-lora-32k", kLlama8B, 0, true, {"train.global_batch=1"}, {}, false, 32768},
      {"8b-qlora", kLlama8B, 0, true, {b8, "model.quantize=\"nf4\""}},
      {"8b-24gib", kLlama8B, 0, false, {"train.global_batch=32", bf16, "offload.device_memory=\"24GiB\""}},
      {"1b-slice-disk", kLlama1B, 4, false, {b8, bf16, "offload.optimizer=\"nvme\""}, {}, true},
      {"tiny", kTiny, 0, false, tiny, {}, false, 32},
      {"tiny-lora", kTiny, 0, true, tiny, {}, false, 32},
      {"tiny-off-device", kTiny, 0, false, {tiny[0], bf16, host, "offload.weights=\"host\""}, {}, false, 32},
  };
}

ModelSpec spec_of(const Row& row) {
  nlohmann::json shape = nlohmann::json::parse(row.shape);
  if (row.layers > 0) shape["num_hidden_layers"] = row.layers;
  return parse_model_spec(shape.dump(), row.name);
}

bool chosen(const Row& row, const std::vector<std::string>& wanted, const std::string& path) {
  const std::string name = row.name;
  if (row.disk && path.empty()) return false;
  if (wanted.empty()) return name.find("slice") != std::string::npos;
  return std::any_of(wanted.begin(), wanted.end(), [&](const std::string& word) {
    return word.ends_with('*') ? name.starts_with(word.substr(0, word.size() - 1)) : name == word;
  });
}

Machine this_machine(const std::string& path, int threads) {
  const GpuInfo info = cuda_device(0);
  Machine machine;
  machine.cores = threads;
  Gpu gpu = built_in_gpu(info.name);
  gpu.memory_bytes = info.total_bytes;
  gpu.free_bytes = info.free_bytes;
  gpu.link_bandwidth = probe_copies(DeviceType::kCuda).each_way();
  machine.gpus = {gpu};
  machine.memory_bandwidth = probe_host_memory(threads);
  if (!path.empty()) machine.disks = {{.path = path, .free_bytes = int64_t{1} << 40}};
  return machine;
}

struct Options {
  std::string path, traces;  // directories, or empty
  int steps = 5;
  std::vector<std::string> wanted;
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--path" && i + 1 < argc) {
      options.path = argv[++i];
    } else if (word == "--trace" && i + 1 < argc) {
      options.traces = argv[++i];
    } else if (word == "--steps" && i + 1 < argc) {
      options.steps = std::max(std::atoi(argv[++i]), 1);
    } else {
      options.wanted.push_back(word);
    }
  }
  return options;
}

// A step may take so much longer than planned; of rows that are there to be measured. (With checksums of
// tiers in host memory taken on the CPU it took 1.9 times as long.)
constexpr double kMostOfPlan = 1.25;
bool too_long(const Row& row, double step, double planned) {
  return !std::string(row.name).starts_with("tiny") && step > kMostOfPlan * planned;
}

struct Timed {
  double step_s = 0;                       // median
  double copies_s = 0, stall_s = 0;        // of a step: links at work, and compute waiting for them
  double first_loss = 0, loss = 0;         // before any update, and of the last step whose results are read
  std::optional<double> megahertz, watts;  // at the end, while the last step is computed
};

Timed time_steps(SyntheticRun& run, int steps) {
  std::vector<double> seconds;
  Timed out;
  DeviceClock* const clock = run.rank().off_device().clock();
  double copies = 0, stall = 0, last = monotonic_seconds();
  for (int i = 0; i < steps + 2; ++i) {
    const double loss = run.begin_step().loss;
    if (i == 0) out.first_loss = loss;
    if (i != 1) out.loss = loss;  // the second's come with the third
    if (clock != nullptr) clock->collect();
    const double now = monotonic_seconds();
    if (i >= 2) seconds.push_back(now - last);
    if (i == 1 && clock != nullptr) copies = clock->copy_seconds(), stall = clock->stall_seconds();
    last = now;
  }
  for (const GpuReading& gpu : GpuMeter().read()) {
    if (gpu.name != cuda_device(0).name) continue;
    out.megahertz = gpu.megahertz, out.watts = gpu.watts;
    break;
  }
  if (clock != nullptr) {
    out.copies_s = (clock->copy_seconds() - copies) / steps;
    out.stall_s = (clock->stall_seconds() - stall) / steps;
  }
  std::sort(seconds.begin(), seconds.end());
  out.step_s = seconds[seconds.size() / 2];
  return out;
}

// First losses by model and batch.
using FirstLosses = std::map<std::string, double>;

// Micro-batches of other sizes round otherwise; weights that were not filled are off by a factor of 4.
void check_first_loss(const Row& row, double loss, FirstLosses& losses) {
  std::string model = row.shape + std::to_string(row.layers) + row.settings.front();
  if (row.settings.back().starts_with("model.quantize")) model += row.settings.back();
  const double other = losses.try_emplace(model, loss).first->second;
  LM_CHECK(std::abs(loss - other) <= 2e-3 * std::abs(other), "its first loss is " + std::to_string(loss) +
                                                                 ", that of the same model above " +
                                                                 std::to_string(other));
}

// Tokens per second.
double run_row(const Row& row, const Options& options, int threads, StreamView stream, FirstLosses& losses) {
  std::vector<std::string> settings = row.settings;
  settings.push_back("run.threads=" + std::to_string(threads));
  settings.push_back("data.max_length=" + std::to_string(row.length));
  if (row.disk) settings.push_back("offload.paths=[\"" + options.path + "\"]");
  if (row.lora) settings.push_back("train.method=\"lora\"");
  SyntheticSetup setup{
      .spec = spec_of(row),
      .lora = row.lora,
      .config = parse_config("[model]\npath = \"none\"\n[data]\ntrain = [\"none\"]\n", "benchmark", settings),
      .update_on_host = row.update_on_host,
      .pattern = true};
  std::optional<Trace> trace;
  if (!options.traces.empty()) {
    trace.emplace(options.traces + "/" + row.name + ".json", 3, 4);
    setup.trace = &*trace;
  }
  const int64_t before = cuda_device(0).free_bytes;
  SyntheticRun run(std::move(setup), this_machine(row.disk ? options.path : "", threads), stream);
  const Timed timed = time_steps(run, options.steps);
  const double step = timed.step_s;
  const Plan& plan = run.plan();
  const auto tokens = static_cast<double>(run.tokens_per_step());
  const double sol = 100 * plan.peak_seconds_per_token * tokens / step;
  const int64_t used = before - cuda_device(0).free_bytes;
  std::printf(
      "%-24s %8.0f tokens/s %5.1f %% of light %8.3f s a step (planned %.3f; copies %.3f, waited for %.3f) "
      "%9s of "
      "GPU (planned %s), %.0f MHz, %.0f W\n",
      row.name, tokens / step, sol, step, plan.step_seconds, timed.copies_s, timed.stall_s,
      format_bytes(used).c_str(), format_bytes(plan.peak.device).c_str(), timed.megahertz.value_or(0),
      timed.watts.value_or(0));
  std::printf("%s\n", nlohmann::json{{"benchmark", "gpu_steps"},
                                     {"row", row.name},
                                     {"gpu", cuda_device(0).name},
                                     {"tokens_per_s", tokens / step},
                                     {"sol_pct", sol},
                                     {"step_s", step},
                                     {"planned_step_s", plan.step_seconds},
                                     {"device_bytes", used},
                                     {"planned_device_bytes", plan.peak.device},
                                     {"update_on_host", plan.placement.update_on_host},
                                     {"copies_s", timed.copies_s},
                                     {"stall_s", timed.stall_s},
                                     {"sm_mhz", timed.megahertz.value_or(0)},
                                     {"watts", timed.watts.value_or(0)},
                                     {"first_loss", timed.first_loss},
                                     {"loss", timed.loss}}
                          .dump()
                          .c_str());
  std::fflush(stdout);
  check_first_loss(row, timed.first_loss, losses);
  LM_CHECK(!too_long(row, step, plan.step_seconds),
           "a step takes " + std::to_string(step / plan.step_seconds) + " times as long as planned");
  return tokens / step;
}

int run_rows(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  std::string reason;
  if (cuda_device_count(&reason) == 0) {
    std::printf("gpu_steps: no CUDA device: %s\n", reason.c_str());
    return 0;
  }
  const auto threads = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));
  const StreamView stream = start_torch(DeviceType::kCuda, threads, true);
  int failed = 0, ran = 0;
  FirstLosses losses;
  std::string figure;
  for (const Row& row : rows()) {
    if (!chosen(row, options.wanted, options.path)) continue;
    ++ran;
    try {
      const double rate = run_row(row, options, threads, stream, losses);
      figure += std::string(figure.empty() ? "" : ", ") + row.name + " " + std::to_string(std::lround(rate));
    } catch (const std::exception& error) {
      const auto* own = dynamic_cast<const Error*>(&error);
      std::printf("%-24s failed: %s\n", row.name, own != nullptr ? own->report().c_str() : error.what());
      ++failed;
    }
  }
  std::printf("figure: %s tokens/s\n", figure.c_str());
  return failed == 0 && ran > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return run_rows(argc, argv);
}
