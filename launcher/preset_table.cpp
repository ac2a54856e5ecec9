#include "launcher/preset_table.h"

#include <fmt/format.h>
#include <string_view>

namespace lm {
namespace {

struct Row {
  const char* name;    // of the model, in the preset's
  const char* path;    // the model that people tune
  const char* method;  // "qlora", "lora", "full"
  int gigabytes;       // of the card's memory, or of the machine's without a card
  int max_length;      // longest of 512, 1024, 2048 and 4096 that fits (tests/launcher/presets_test.cpp)
  bool cpu = false;
};

constexpr Row kRows[] = {
    {"deepseek-r1-distill-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "qlora", 12, 4096},
    {"deepseek-r1-distill-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "lora", 24, 4096},
    {"deepseek-r1-distill-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "full", 48, 4096},
    {"falcon3-7b", "tiiuae/Falcon3-7B-Instruct", "qlora", 8, 1024},
    {"falcon3-7b", "tiiuae/Falcon3-7B-Instruct", "qlora", 12, 4096},
    {"falcon3-7b", "tiiuae/Falcon3-7B-Instruct", "lora", 24, 4096},
    {"falcon3-7b", "tiiuae/Falcon3-7B-Instruct", "full", 48, 4096},
    {"gemma-2-2b", "google/gemma-2-2b-it", "lora", 12, 4096},
    {"gemma-2-2b", "google/gemma-2-2b-it", "full", 16, 4096},
    {"gemma-2-2b", "google/gemma-2-2b-it", "qlora", 8, 512, true},
    {"gemma-2-9b", "google/gemma-2-9b-it", "qlora", 16, 4096},
    {"gemma-2-9b", "google/gemma-2-9b-it", "lora", 48, 4096},
    {"gemma-3-1b", "google/gemma-3-1b-it", "lora", 8, 4096},
    {"gemma-3-1b", "google/gemma-3-1b-it", "full", 8, 4096},
    {"gemma-3-1b", "google/gemma-3-1b-it", "qlora", 8, 512, true},
    {"gemma-3-1b", "google/gemma-3-1b-it", "lora", 8, 512, true},
    {"gemma-3-1b", "google/gemma-3-1b-it", "full", 16, 512, true},
    {"gemma-3-270m", "google/gemma-3-270m-it", "lora", 8, 4096},
    {"gemma-3-270m", "google/gemma-3-270m-it", "full", 8, 4096},
    {"gemma-3-270m", "google/gemma-3-270m-it", "lora", 8, 512, true},
    {"gemma-3-270m", "google/gemma-3-270m-it", "full", 8, 512, true},
    {"gemma-4-12b", "google/gemma-4-12B-it", "qlora", 24, 4096},
    {"gemma-4-12b", "google/gemma-4-12B-it", "lora", 48, 4096},
    {"gemma-4-12b", "google/gemma-4-12B-it", "full", 80, 4096},
    {"gemma-4-31b", "google/gemma-4-31B-it", "qlora", 48, 4096},
    {"gemma-4-31b", "google/gemma-4-31B-it", "lora", 80, 4096},
    {"gemma-4-e2b", "google/gemma-4-E2B-it", "qlora", 12, 4096},
    {"gemma-4-e2b", "google/gemma-4-E2B-it", "lora", 24, 4096},
    {"gemma-4-e2b", "google/gemma-4-E2B-it", "full", 24, 4096},
    {"gemma-4-e2b", "google/gemma-4-E2B-it", "qlora", 16, 512, true},
    {"gemma-4-e2b", "google/gemma-4-E2B-it", "lora", 16, 512, true},
    {"gemma-4-e4b", "google/gemma-4-E4B-it", "qlora", 24, 4096},
    {"gemma-4-e4b", "google/gemma-4-E4B-it", "lora", 48, 4096},
    {"gemma-4-e4b", "google/gemma-4-E4B-it", "full", 48, 4096},
    {"glm-4-9b", "zai-org/GLM-4-9B-0414", "qlora", 16, 4096},
    {"glm-4-9b", "zai-org/GLM-4-9B-0414", "lora", 48, 4096},
    {"granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", "qlora", 8, 4096},
    {"granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", "lora", 12, 4096},
    {"granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", "full", 16, 4096},
    {"granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", "qlora", 8, 512, true},
    {"granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", "qlora", 12, 4096},
    {"granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", "lora", 24, 4096},
    {"granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", "full", 48, 4096},
    {"llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "qlora", 12, 4096},
    {"llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "lora", 24, 4096},
    {"llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "full", 48, 4096},
    {"llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "qlora", 8, 4096},
    {"llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "lora", 8, 4096},
    {"llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "full", 8, 4096},
    {"llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "qlora", 8, 512, true},
    {"llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "lora", 8, 512, true},
    {"llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "full", 32, 512, true},
    {"llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "qlora", 8, 4096},
    {"llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "lora", 12, 4096},
    {"llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "full", 16, 4096},
    {"llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "qlora", 8, 512, true},
    {"llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", "lora", 16, 512, true},
    {"mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "qlora", 8, 2048},
    {"mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "qlora", 12, 4096},
    {"mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "lora", 24, 4096},
    {"mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", "full", 48, 4096},
    {"mistral-nemo-12b", "mistralai/Mistral-Nemo-Instruct-2407", "qlora", 12, 1024},
    {"mistral-nemo-12b", "mistralai/Mistral-Nemo-Instruct-2407", "qlora", 16, 4096},
    {"mistral-nemo-12b", "mistralai/Mistral-Nemo-Instruct-2407", "lora", 48, 4096},
    {"mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", "qlora", 24, 4096},
    {"mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", "lora", 80, 4096},
    {"olmo-2-1b", "allenai/OLMo-2-0425-1B-Instruct", "lora", 8, 4096},
    {"olmo-2-1b", "allenai/OLMo-2-0425-1B-Instruct", "full", 8, 4096},
    {"olmo-2-1b", "allenai/OLMo-2-0425-1B-Instruct", "lora", 8, 512, true},
    {"olmo-2-1b", "allenai/OLMo-2-0425-1B-Instruct", "full", 32, 512, true},
    {"olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct", "qlora", 12, 4096},
    {"olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct", "lora", 24, 4096},
    {"olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct", "full", 48, 4096},
    {"phi-4", "microsoft/phi-4", "qlora", 24, 4096},
    {"phi-4", "microsoft/phi-4", "lora", 48, 4096},
    {"phi-4", "microsoft/phi-4", "full", 80, 4096},
    {"phi-4-mini", "microsoft/Phi-4-mini-instruct", "qlora", 8, 4096},
    {"phi-4-mini", "microsoft/Phi-4-mini-instruct", "lora", 16, 4096},
    {"phi-4-mini", "microsoft/Phi-4-mini-instruct", "full", 16, 4096},
    {"phi-4-mini", "microsoft/Phi-4-mini-instruct", "qlora", 8, 512, true},
    {"phi-4-mini", "microsoft/Phi-4-mini-instruct", "lora", 16, 512, true},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "qlora", 8, 4096},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "lora", 8, 4096},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "full", 8, 4096},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "qlora", 8, 512, true},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "lora", 8, 512, true},
    {"qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "full", 8, 512, true},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "qlora", 8, 4096},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "lora", 8, 4096},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "full", 8, 4096},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "qlora", 8, 512, true},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "lora", 8, 512, true},
    {"qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "full", 32, 512, true},
    {"qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", "qlora", 16, 2048},
    {"qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", "qlora", 24, 4096},
    {"qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", "lora", 48, 4096},
    {"qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", "qlora", 48, 4096},
    {"qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", "lora", 80, 2048},
    {"qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "qlora", 8, 4096},
    {"qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "lora", 12, 4096},
    {"qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "full", 16, 4096},
    {"qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "qlora", 8, 512, true},
    {"qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "lora", 8, 512, true},
    {"qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "qlora", 12, 4096},
    {"qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "lora", 24, 4096},
    {"qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", "full", 48, 4096},
    {"qwen2.5-coder-7b", "Qwen/Qwen2.5-Coder-7B-Instruct", "qlora", 12, 4096},
    {"qwen2.5-coder-7b", "Qwen/Qwen2.5-Coder-7B-Instruct", "lora", 24, 4096},
    {"qwen2.5-coder-7b", "Qwen/Qwen2.5-Coder-7B-Instruct", "full", 48, 4096},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", "qlora", 8, 4096},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", "lora", 8, 4096},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", "full", 8, 4096},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", "qlora", 8, 512, true},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", "lora", 8, 512, true},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B", "full", 16, 512, true},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", "qlora", 8, 4096},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", "lora", 8, 4096},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", "full", 8, 4096},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", "qlora", 8, 512, true},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", "lora", 8, 512, true},
    {"qwen3-1.7b", "Qwen/Qwen3-1.7B", "full", 32, 512, true},
    {"qwen3-14b", "Qwen/Qwen3-14B", "qlora", 16, 2048},
    {"qwen3-14b", "Qwen/Qwen3-14B", "qlora", 24, 4096},
    {"qwen3-14b", "Qwen/Qwen3-14B", "lora", 48, 4096},
    {"qwen3-32b", "Qwen/Qwen3-32B", "qlora", 48, 4096},
    {"qwen3-32b", "Qwen/Qwen3-32B", "lora", 80, 2048},
    {"qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", "qlora", 8, 4096},
    {"qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", "lora", 12, 2048},
    {"qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", "lora", 16, 4096},
    {"qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", "full", 16, 4096},
    {"qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", "qlora", 8, 512, true},
    {"qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", "lora", 16, 512, true},
    {"qwen3-8b", "Qwen/Qwen3-8B", "qlora", 12, 4096},
    {"qwen3-8b", "Qwen/Qwen3-8B", "lora", 24, 4096},
    {"qwen3-8b", "Qwen/Qwen3-8B", "full", 48, 4096},
    {"smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "qlora", 8, 4096},
    {"smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "lora", 8, 4096},
    {"smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "full", 8, 4096},
    {"smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "qlora", 8, 512, true},
    {"smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "lora", 8, 512, true},
    {"smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "full", 32, 512, true},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "qlora", 8, 4096},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "lora", 8, 4096},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "full", 8, 4096},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "qlora", 8, 512, true},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "lora", 8, 512, true},
    {"smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "full", 8, 512, true},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "qlora", 8, 4096},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "lora", 8, 4096},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "full", 8, 4096},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "qlora", 8, 512, true},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "lora", 8, 512, true},
    {"smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "full", 8, 512, true},
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "qlora", 8, 4096},
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "lora", 12, 4096},
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "full", 16, 4096},
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "qlora", 8, 512, true},
    {"smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "lora", 8, 512, true},
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "qlora", 8, 2048},
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "lora", 8, 2048},
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "full", 8, 2048},
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "qlora", 8, 512, true},
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "lora", 8, 512, true},
    {"tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "full", 32, 512, true},
};

std::string name_of(const Row& row) {
  return fmt::format("{}-{}-{}{}gb", row.name, row.method, row.cpu ? "cpu-" : "", row.gigabytes);
}

std::string text_of(const Row& row) {
  const std::string_view method = row.method;
  const bool full = method == "full";
  const std::string place = row.cpu ? fmt::format("the CPU with {} GB of memory", row.gigabytes)
                                    : fmt::format("one GPU of {} GB", row.gigabytes);
  std::string out =
      fmt::format("# {} {} on {}, {} tokens a sequence. Planned, not run on such a machine.\n#\n",
                  full               ? "All weights of"
                  : method == "lora" ? "LoRA of"
                                     : "QLoRA of",
                  row.path, place, row.max_length);
  out += fmt::format(
      "#   lmlaunch presets {} > my.toml      then set data.train, and see `lmlaunch plan my.toml`\n",
      name_of(row));
  if (full && !row.cpu)
    out +=
        "#\n# State that does not fit on the card is offloaded to host memory: the plan prints how much.\n";
  out +=
      fmt::format("\n[run]\ndevice = \"{}\"\n\n[model]\npath = \"{}\"  # in the hub cache, or a directory\n",
                  row.cpu ? "cpu" : "cuda", row.path);
  out += fmt::format(
      "\n[data]\ntrain = [\"train.jsonl\"]\neval_fraction = 0.02\nmax_length = {}\npacking = true\n",
      row.max_length);
  out += fmt::format("\n[train]\nmethod = \"{}\"\nepochs = 1\nglobal_batch = 16\n", row.method);
  if (full) out += "gradients = \"bf16\"\n";
  if (!full) out += "\n[lora]\nr = 16\nalpha = 32\n";
  out +=
      fmt::format("\n[optimizer]\nlr = {}\nschedule = \"cosine\"\nwarmup = 0.03\n", full ? "1e-5" : "2e-4");
  return out;
}

}  // namespace

std::vector<Preset> preset_table() {
  std::vector<Preset> out;
  for (const Row& row : kRows) out.push_back({name_of(row), text_of(row)});
  return out;
}

}  // namespace lm
