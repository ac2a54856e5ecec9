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
  int max_length;  // the longest of 512, 1024, 2048 and 4096 that fits, as tests/launcher/presets_test.cpp
                   // plans it
  bool cpu = false;
};

constexpr Row kRows[] = {
    {"qwen3-8b", "Qwen/Qwen3-8B", "qlora", 12, 1024},
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
    out += "#\n# What the card has no room for lives in host memory: the plan says how much.\n";
  out +=
      fmt::format("\n[run]\ndevice = \"{}\"\n\n[model]\npath = \"{}\"  # in the hub cache, or a directory\n",
                  row.cpu ? "cpu" : "cuda", row.path);
  out += fmt::format(
      "\n[data]\ntrain = [\"train.jsonl\"]\neval_fraction = 0.02\nmax_length = {}\npacking = true\n",
      row.max_length);
  out += fmt::format("\n[train]\nmethod = \"{}\"\nepochs = 1\nglobal_batch = 16\n", row.method);
  if (full) out += "gradients = \"bf16\"\n";
  if (!full) out += "\n[lora]\nr = 16\nalpha = 32\ndropout = 0.05\n";
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
