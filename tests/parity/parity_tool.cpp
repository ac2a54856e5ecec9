// One batch through the model, its gradients and the optimizer, dumped for comparison with other people's
// code:
//
//   parity_tool MODEL_DIR INPUT.safetensors OUTPUT.safetensors [--dtype fp32|bf16|fp16] [--steps N] [--lr X]
//     [--weight-decay X] [--recompute none|attention|block|N] [--micro-batches M] [--adapter PEFT_DIR]
//     [--threads N]
//     [--optimizer-threads N] [--gradients fp32|bf16] [--master split|fp32|none] [--max-grad-norm X] [--eps
//     X]
//     [--off-device none|disk|host] (with a tied head) [--quantize none|nf4|fp4|int8] [--double-quantize
//     yes|no] [--adapter-dtype auto|fp32] [--generate N [--together yes]] [--max-length N] [--groups TOML of
//     optimizer.groups]
//     [--only TOML of train.only] [--encoder N: PEFT_DIR has P-tuning's encoder of that size]
//
// On the CPU; parity_tool_gpu is the same on the first GPU.
//
// Without arguments it serves: each line of standard input is a run, as words with tabs between, the first a
// file for its error messages, the others its arguments. A run is a process of its own, which has at most two
// minutes; its exit status, or minus the signal that ended it, is written as a line. So LibTorch, which takes
// longer to load than most runs take, is loaded once.
//
// INPUT: i32 `token`, `position`, `target` (-1 = none), `document_start` of a padding-free batch, whose
// documents are dealt to the micro-batches in order. OUTPUT: `logits`, `loss`, `grad.<name>` of the first
// step, and after N AdamW steps at a constant rate `losses` [N + 1], `norms` [N], `weight.<name>` and, in
// fp32, `master.<name>`. Off the device (on disk, or in host memory with slots on the device, as on a GPU)
// are optimizer state, gradients and weights; `grad.` is then left out. With --generate there is `generated`
// alone, [documents, N]: the likeliest tokens after each of them; --together: of all of them, a token of each
// in one pass. --max-length is data.max_length, on which some kinds of RoPE depend; without it, as many as
// the model's positions.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/staging.h"
#include "config/config_names.h"
#include "config/config_toml.h"
#include "kernels/runtime.h"
#include "plan/base_encoding.h"
#include "plan/parameter_groups.h"
#include "plan/trained_tensors.h"
#include "tests/support/limit_processor.h"
#include "train/rank.h"
#include "train/sampling.h"
#include "weights/adapter_files.h"
#include "weights/convert.h"
#include "weights/load_store.h"
#include "weights/model_directory.h"
#include "weights/safetensors.h"

namespace {

using namespace lm;

struct Arguments {
  std::string model, input, output;
  std::map<std::string, std::string> options;
  std::string get(const std::string& name, const std::string& fallback) const {
    const auto found = options.find(name);
    return found == options.end() ? fallback : found->second;
  }
};

std::vector<int32_t> read_ints(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry* entry = file.find(name);
  LM_CHECK(entry != nullptr, name);
  std::vector<int32_t> out(static_cast<size_t>(entry->shape.at(0)));
  file.read(*entry, 0, std::as_writable_bytes(std::span(out)));
  return out;
}

StepBatches read_batches(const std::string& path, int64_t micro_batches) {
  const SafetensorsFile file(path);
  const std::vector<int32_t> token = read_ints(file, "token"), position = read_ints(file, "position"),
                             target = read_ints(file, "target"), start = read_ints(file, "document_start");
  const auto documents = static_cast<int64_t>(start.size()) - 1;
  StepBatches out;
  for (int64_t m = 0; m < micro_batches; ++m) {
    const int64_t first = documents * m / micro_batches, last = documents * (m + 1) / micro_batches;
    Batch batch;
    const int32_t begin = start[static_cast<size_t>(first)], end = start[static_cast<size_t>(last)];
    batch.token.assign(token.begin() + begin, token.begin() + end);
    batch.position.assign(position.begin() + begin, position.begin() + end);
    batch.target.assign(target.begin() + begin, target.begin() + end);
    for (int64_t d = first; d <= last; ++d) {
      batch.document_start.push_back(start[static_cast<size_t>(d)] - begin);
      if (d == last) break;
      batch.sample.insert(
          batch.sample.end(),
          static_cast<size_t>(start[static_cast<size_t>(d) + 1] - start[static_cast<size_t>(d)]),
          static_cast<int32_t>(d));
    }
    for (const int32_t id : batch.target) out.target_tokens += id >= 0;
    out.micro.push_back(std::move(batch));
  }
  return out;
}

struct Output {
  std::vector<TensorInfo> infos;
  std::map<std::string, std::vector<float>> data;
  void add(const std::string& name, const std::vector<int64_t>& shape, std::vector<float> values) {
    infos.push_back({name, DType::kF32, shape});
    data[name] = std::move(values);
  }
  void write(const std::string& path) const {
    SafetensorsWriter writer(path, infos);
    for (const TensorInfo& info : writer.order())
      writer.write(info.name, std::as_bytes(std::span(data.at(info.name))));
    writer.commit();
  }
};

// `from` may be the device's memory.
std::vector<float> to_floats(const std::byte* from, DType dtype, int64_t elements, Staging& staging) {
  std::vector<float> out(static_cast<size_t>(elements));
  std::vector<std::byte> host(out.size() * dtype_size(dtype));
  staging.read_into(host.data(), from, std::ssize(host));
  const std::byte* const memory = host.data();
  convert_elements(memory, dtype, reinterpret_cast<std::byte*>(out.data()), DType::kF32, elements);
  return out;
}

// As the files have it.
std::vector<float> transposed(const std::vector<float>& values, int64_t rows, int64_t columns) {
  std::vector<float> out(values.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j)
      out[static_cast<size_t>(j * rows + i)] = values[static_cast<size_t>(i * columns + j)];
  }
  return out;
}

// Every Hugging Face tensor of the trainable part, with `prefix`; values(block, place, part) gives its fp32
// values.
template <class Values>
void dump(Output& output, const std::string& prefix, const ModelLayout& layout, const Values& values) {
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    for (const TensorPlace& place : layout.blocks[b].tensors) {
      if (place.frozen) continue;
      const Parameter& p = place.parameter;
      for (const ParameterPart& part : p.parts) {
        std::vector<float> data = values(static_cast<int64_t>(b), place, part);
        if (part.transposed) data = transposed(data, part.rows, p.columns);
        output.add(prefix + part.name, p.shape(part), std::move(data));
      }
    }
  }
}

// Of a block's flat array that begins at `array`.
std::vector<float> part_of(const std::byte* array, DType dtype, const TensorPlace& place,
                           const ParameterPart& part, Staging& staging) {
  const int64_t columns = place.parameter.columns, first = place.offset + part.first * columns;
  return to_floats(array + first * static_cast<int64_t>(dtype_size(dtype)), dtype, part.rows * columns,
                   staging);
}

int64_t longest(const StepBatches& batches) {
  int64_t tokens = 0;
  for (const Batch& batch : batches.micro) tokens = std::max(tokens, batch.tokens());
  return tokens;
}

// What the arguments say, and what follows from them.
struct Case {
  explicit Case(const Arguments& arguments)
      : threads(std::stoi(arguments.get("threads", "2"))),
        spec(read_model_spec(arguments.model)),
        adapter_directory(arguments.get("adapter", "")),
        tier_id(arguments.get("off-device", "none")),
        dtype(storage_type(parse_name<ModelDType>(arguments.get("dtype", "fp32")).value())),
        micro_batches(std::stoll(arguments.get("micro-batches", "1"))),
        max_length(std::stoll(arguments.get("max-length", "0"))),
        batches(read_batches(arguments.input, micro_batches)),
        whole(read_batches(arguments.input, 1)) {
    if (!adapter_directory.empty()) adapter = read_adapter_config(adapter_directory, &spec).spec;
    if (const int64_t encoder = std::stoll(arguments.get("encoder", "0")); encoder > 0) {
      adapter->encoded = false;
      adapter->encoder = encoder;
    }
    const TrainConfig train = parsed(arguments, "only", "train.only").train;
    layout = make_layout(spec, adapter_spec(), dtype, base_encoding(model_config(arguments)),
                         trained_filter(train, spec));
    optimizer.weight_decay = std::stod(arguments.get("weight-decay", "0"));
    const std::string master = arguments.get("master", "split");
    optimizer.name = parse_name<RuleId>(arguments.get("optimizer", "adamw")).value();
    optimizer.rule.of<AdamW>().eps = std::stod(arguments.get("eps", "1e-8"));
    optimizer.rule.of<Sgd>().momentum = std::stod(arguments.get("momentum", "0.9"));
    max_grad_norm = std::stod(arguments.get("max-grad-norm", "1e30"));
    optimizer.master = master == "fp32" ? Master::kF32 : master == "none" ? Master::kNone : Master::kSplit;
    optimizer.groups = parsed(arguments, "groups", "optimizer.groups").optimizer.groups;
    set_groups(optimizer, layout);
    plan.numerics.dtype = dtype;
    plan.numerics.fp32_adapters = adapter && arguments.get("adapter-dtype", "auto") == "fp32";
    plan.numerics.rule = optimizer.name;
    plan.numerics.stateless = is_stateless(optimizer.name, optimizer.rule);
    plan.numerics.master = optimizer.master;
    plan.numerics.gradient_dtype = arguments.get("gradients", "fp32") == "bf16" ? DType::kBF16 : DType::kF32;
    plan.numerics.micro_batches = micro_batches;
    plan.numerics.row_chunk = 48;
    plan.numerics.recompute = parse_recompute(arguments.get("recompute", "none")).value();
    plan.numerics.threads = threads;
    plan.placement.blocks = std::ssize(layout.blocks);
    plan.placement.optimizer_threads = std::stoi(arguments.get("optimizer-threads", std::to_string(threads)));
    plan.micro_tokens = longest(batches);
    plan.cache_positions = arguments.options.contains("generate") ? spec.max_positions : 0;
    if (arguments.options.contains("together")) plan.cache_texts = whole.micro[0].documents();
    if (device == DeviceType::kCuda) place_on_device();
    if (off_device()) place_off_device();
    plan.step = step_config(spec, layout, plan, plan.micro_tokens, optimizer.clip);
    if (!adapter) plan.step.first_trained = layout.first_trained();
    plan.arena = arena_need({spec, layout, adapter_spec()}, plan.step, whole.micro[0].tokens(), 64);
    // All rows' logits at once, which training never has, gather every row.
    plan.arena.bytes += whole.micro[0].tokens() * (spec.hidden + 2) * 8;
  }
  // The configuration with that key, where its option is given.
  static Config parsed(const Arguments& arguments, const std::string& option, const std::string& key) {
    std::vector<std::string> overrides;
    if (arguments.options.contains(option)) overrides.push_back(key + "=" + arguments.get(option, ""));
    return parse_config("[model]\npath = \"m\"\n[data]\ntrain = [\"d\"]\n", "", overrides);
  }
  static ModelConfig model_config(const Arguments& arguments) {
    ModelConfig out;
    out.quantize = parse_name<Quantize>(arguments.get("quantize", "none")).value();
    out.double_quantize = arguments.get("double-quantize", "yes") == "yes";
    return out;
  }
  // More than models this small need.
  void place_on_device() {
    plan.placement.device = device;
    plan.upload_bytes = 4 * kMiB;
    plan.result_bytes = kStepResultBytes + Gradients::norm_bytes(layout);
    plan.library_device_bytes = 1024 * kMiB;
  }
  bool off_device() const { return tier_id != "none"; }
  // Where a plan has room for nothing on the device.
  void place_off_device() {
    Config config;
    config.data.max_length = spec.max_positions;
    config.train.micro_batch = 1;
    config.train.global_batch = micro_batches;
    config.train.method = adapter ? Method::kLora : Method::kFull;
    config.train.recompute = plan.numerics.recompute;
    config.train.gradients =
        plan.numerics.gradient_dtype == DType::kBF16 ? GradientDType::kBF16 : GradientDType::kF32;
    config.model.dtype = model_type(dtype);
    config.lora.dtype = plan.numerics.fp32_adapters ? LoraDType::kF32 : LoraDType::kAuto;
    config.optimizer.master = optimizer.master;
    config.optimizer.name = optimizer.name;
    config.optimizer.rule = optimizer.rule;
    config.offload.optimizer = config.offload.weights = OffloadTier::kNvme;
    config.offload.gradients = adapter ? OffloadTier::kNone : OffloadTier::kNvme;
    config.offload.activations = OffloadTier::kNone;
    config.io.tile = ByteSize{2 * 4096 * 16};
    Machine machine;
    machine.cores = 2;
    PlacementPlan& p = plan.placement;
    p = make_plan({config, spec, adapter_spec(), layout, device}, machine).placement;
    p.group = 1;
    LM_CHECK(p.head_segments() == 0, "off the device only with a tied head");  // as dump finds it
    for (PoolPlan& pool : p.pools) {
      if (tier_id == "host") pool.tier_id = TierId::kHost;
    }
  }
  const AdapterSpec* adapter_spec() const { return adapter ? &*adapter : nullptr; }
  RankSetup setup() const {
    return {.spec = spec,
            .layout = layout,
            .adapter = adapter_spec(),
            .optimizer = optimizer,
            .plan = plan,
            .seed = 42,
            .max_length = max_length > 0 ? max_length : spec.max_positions,
            .tokens_per_step = whole.micro[0].tokens(),
            .max_grad_norm = max_grad_norm,
            .swap_paths = {{std::filesystem::temp_directory_path().string(), 1}},
            .slots_on_device = tier_id == "host"};
  }

  DeviceType device = cuda_built() ? DeviceType::kCuda : DeviceType::kCpu;
  int threads;
  ModelSpec spec;
  std::string adapter_directory, tier_id;
  double max_grad_norm = 0;
  std::optional<AdapterSpec> adapter;
  DType dtype;
  int64_t micro_batches, max_length;
  StepBatches batches, whole;
  ModelLayout layout;
  OptimizerConfig optimizer;
  Plan plan;
};

// Working weights, and the masters that they are rounded from.
void dump_weights(const Case& c, Rank& rank, Staging& staging, Output& output) {
  std::optional<OpenUnit> open;  // one at a time: of what is off the device each passes through one slot
  const auto weights = [&](int64_t b) {
    if (!open || open->unit() != b) {
      open.reset();
      open.emplace(rank.weights().open(b, false));
    }
    return open->trainable();
  };
  dump(output, "weight.", c.layout, [&](int64_t b, const TensorPlace& place, const ParameterPart& part) {
    return part_of(weights(b), c.plan.numerics.trained_dtype(), place, part, staging);
  });
  dump(output, "master.", c.layout, [&](int64_t b, const TensorPlace& place, const ParameterPart& part) {
    const Parameter& p = place.parameter;
    std::vector<float> all(static_cast<size_t>(p.elements()));
    rank.optimizer().read_master(b, place, weights(b), all.data(), staging);
    const auto begin = all.begin() + part.first * p.columns;
    return std::vector<float>(begin, begin + part.rows * p.columns);
  });
}

constexpr double kLossScale = 1024;  // in fp16; gradients, which have it, are left out then

// Trains `steps` and adds losses [steps + 1], the first step's gradients and the last weights.
void train(const Case& c, Rank& rank, StreamView stream, int steps, double lr, Output& output) {
  Staging staging(stream);
  std::vector<float> losses, norms;
  for (int step = 1; step <= std::max(steps, 1); ++step) {
    const double scale = c.dtype == DType::kF16 ? kLossScale : 1;
    const StepResult result = rank.step().run(c.batches, step, steps > 0 ? lr : 0.0, scale);
    losses.push_back(static_cast<float>(result.loss));
    norms.push_back(static_cast<float>(result.grad_norm));
    if (step > 1) continue;
    output.add("loss", {1}, {static_cast<float>(result.loss)});
    output.add("token_accuracy", {1}, {static_cast<float>(result.token_accuracy)});
    if (c.off_device() || scale != 1) continue;
    dump(output, "grad.", c.layout, [&](int64_t b, const TensorPlace& place, const ParameterPart& part) {
      return part_of(rank.gradients().unit(b), c.plan.numerics.gradient_dtype, place, part, staging);
    });
  }
  if (steps > 0) {
    double nll = 0;
    for (const Batch& batch : c.batches.micro) nll += rank.step().evaluate(batch).nll;
    losses.push_back(static_cast<float>(nll / static_cast<double>(c.batches.target_tokens)));
    dump_weights(c, rank, staging, output);
    output.add("norms", {static_cast<int64_t>(norms.size())}, norms);
  }
  output.add("losses", {static_cast<int64_t>(losses.size())}, losses);
}

// The likeliest tokens, [texts], of logits [texts, V].
std::vector<int32_t> likeliest(std::span<const float> logits, int64_t texts) {
  std::vector<int32_t> out;
  const size_t vocab = logits.size() / static_cast<size_t>(texts);
  for (size_t text = 0; text < static_cast<size_t>(texts); ++text)
    out.push_back(choose_token({}, logits.subspan(text * vocab, vocab), 0));
  return out;
}

void generate_together(const Batch& prompts, Rank& rank, int64_t tokens, Output& output) {
  const int64_t texts = prompts.documents();
  std::vector<Decoder::Next> next;
  for (int64_t d = 0; d < texts; ++d) {
    const auto at = static_cast<size_t>(d);
    const std::span<const int32_t> prompt(prompts.token.data() + prompts.document_start[at],
                                          prompts.token.data() + prompts.document_start[at + 1]);
    next.push_back({d, likeliest(rank.decoder().begin(rank.step(), d, prompt), 1).front()});
  }
  std::vector<float> all(static_cast<size_t>(texts * tokens));
  for (int64_t i = 0; i < tokens; ++i) {
    for (const Decoder::Next& one : next)
      all[static_cast<size_t>(one.text * tokens + i)] = static_cast<float>(one.token);
    if (i + 1 == tokens) break;
    const std::vector<int32_t> chosen = likeliest(rank.decoder().next(rank.step(), next), texts);
    for (Decoder::Next& one : next) one.token = chosen[static_cast<size_t>(one.text)];
  }
  output.add("generated", {texts, tokens}, all);
}

void generate(const Batch& prompts, Rank& rank, int64_t tokens, Output& output) {
  std::vector<float> all;
  for (size_t d = 0; d + 1 < prompts.document_start.size(); ++d) {
    std::vector<int32_t> text(prompts.token.begin() + prompts.document_start[d],
                              prompts.token.begin() + prompts.document_start[d + 1]);
    for (int64_t i = 0; i < tokens; ++i) {
      text.push_back(choose_token({}, rank.decoder().logits(rank.step(), text), i));
      all.push_back(static_cast<float>(text.back()));
    }
  }
  output.add("generated", {prompts.documents(), tokens}, all);
}

void run(const Arguments& arguments) {
  const Case c(arguments);
  const StreamView stream = start_torch(c.device, c.threads, true);
  Rank rank(c.setup(), stream);
  const LoadSetup load{c.spec, c.layout, c.dtype, stream, c.threads};
  load_weights(load, arguments.model, rank.weights());
  const LoadSetup adapters{c.spec, c.layout, c.plan.numerics.trained_dtype(), stream, c.threads};
  if (c.adapter) load_adapter_weights(adapters, c.adapter_directory, rank.weights());
  rank.weights_ready();

  Output output;
  if (const int64_t tokens = std::stoll(arguments.get("generate", "0")); tokens > 0) {
    const bool together = arguments.options.contains("together");
    (together ? generate_together : generate)(c.whole.micro[0], rank, tokens, output);
    return output.write(arguments.output);
  }
  std::vector<int32_t> rows(c.whole.micro[0].token.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
  output.add("logits", {static_cast<int64_t>(rows.size()), c.spec.vocab},
             rank.step().logits(c.whole.micro[0], rows));
  train(c, rank, stream, std::stoi(arguments.get("steps", "0")), std::stod(arguments.get("lr", "0")), output);
  output.write(arguments.output);
}

int run(const std::vector<std::string>& words) {
  if (words.size() < 3 || words.size() % 2 == 0) {
    std::fprintf(stderr, "usage: parity_tool MODEL_DIR INPUT OUTPUT [--option value ...]\n");
    return 2;
  }
  Arguments arguments{words[0], words[1], words[2], {}};
  for (size_t i = 3; i + 1 < words.size(); i += 2) arguments.options[words[i].substr(2)] = words[i + 1];
  try {
    run(arguments);
    return 0;
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "parity_tool: %s\n", error.what());
    return 70;
  }
}

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> out;
  std::istringstream text(line);
  for (std::string word; std::getline(text, word, '\t');) out.push_back(word);
  return out;
}

// This process has no threads before it forks.
int serve() {
  for (std::string line; std::getline(std::cin, line);) {
    std::vector<std::string> words = split(line);
    const pid_t child = fork();
    if (child < 0) return 70;
    if (child == 0) {
      alarm(120);
      if (std::freopen(words.at(0).c_str(), "w", stderr) == nullptr) return 70;
      words.erase(words.begin());
      return run(words);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child) return 70;
    std::cout << (WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status)) << std::endl;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  lm::test::limit_processor();
  return argc == 1 ? serve() : run({argv + 1, argv + argc});
}
