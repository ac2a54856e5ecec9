#include "config/words/word.h"

#include <algorithm>
#include <vector>

#include "config/words/tables.h"

namespace lm {
namespace {

constexpr size_t kTelling = 6;  // letters of a key that is specific without its table: not "type"

struct ProjectRow {
  Project project;
  std::string_view name;
  std::string_view about;  // in the page
  std::vector<std::span<const Word>> own, also;
};

// In the order of the page; answers take the first row that has a word.
const std::vector<ProjectRow>& projects() {
  static const std::vector<ProjectRow> rows = {
      {Project::kNobody, "Other words", "Names that several projects use, and misspellings.", {slips()}, {}},
      {Project::kTrainer,
       "TrainingArguments and SFTConfig",
       "transformers' TrainingArguments, TRL's SFTConfig and ModelConfig, bitsandbytes' settings; as a JSON "
       "or "
       "YAML file.",
       {trainer_words(), task_words()},
       {}},
      {Project::kPeft,
       "PEFT",
       "LoraConfig, and an adapter's adapter_config.json. To train that adapter further, name its "
       "directory in lora.init instead.",
       {peft_words()},
       {}},
      {Project::kAxolotl,
       "Axolotl",
       "A YAML file. Keys of TrainingArguments count as well.",
       {axolotl_words(), axolotl_task_words()},
       {trainer_words()}},
      {Project::kLlamaFactory,
       "LLaMA-Factory",
       "A YAML file. Keys of TrainingArguments count as well.",
       {llama_factory_words()},
       {trainer_words()}},
      {Project::kTorchtune, "torchtune", "A recipe's YAML file.", {torchtune_words()}, {}},
      {Project::kUnsloth,
       "Unsloth",
       "Arguments of its functions and of its command line; the rest are SFTConfig's.",
       {unsloth_words()},
       {trainer_words()}},
      {Project::kDeepSpeed, "DeepSpeed", "A JSON file.", {deepspeed_words()}, {}},
      {Project::kAccelerate,
       "accelerate",
       "The YAML file that `accelerate config` writes.",
       {accelerate_words()},
       {}},
  };
  return rows;
}

const ProjectRow& row_of(Project project) {
  return *std::ranges::find(projects(), project, &ProjectRow::project);
}

bool is_pattern(const Word& word) {
  return word.theirs.ends_with('*');
}

// An exact word, else the longest pattern.
const Word* find_in(const std::vector<std::span<const Word>>& tables, std::string_view theirs,
                    bool patterns) {
  const Word* best = nullptr;
  for (const std::span<const Word> table : tables) {
    for (const Word& word : table) {
      if (is_pattern(word) != patterns) continue;
      const std::string_view stem = patterns ? word.theirs.substr(0, word.theirs.size() - 1) : word.theirs;
      const bool fits = patterns ? theirs.starts_with(stem) : theirs == stem;
      if (fits && (best == nullptr || word.theirs.size() > best->theirs.size())) best = &word;
    }
  }
  return best;
}

// "timeouts" is a misspelling of our key, not a word of the pattern "timeout*".
bool begins_apart(const Word& pattern, std::string_view theirs) {
  const std::string_view stem = pattern.theirs.substr(0, pattern.theirs.size() - 1);
  return theirs == stem || stem.ends_with('_') || stem.ends_with('.') || theirs[stem.size()] == '_';
}

// "learning_rate" of "optimizer.params.learning_rate".
std::string_view last_part(std::string_view theirs) {
  const size_t dot = theirs.rfind('.');
  return dot == std::string_view::npos ? theirs : theirs.substr(dot + 1);
}

std::string here(const Word& word) {
  if (word.fate != Fate::kKey) return "–";
  const std::string key(word.ours);
  return "`" + (word.how == How::kWhenOn ? key + " = " + std::string(word.text) : key) + "`";
}

std::string cell(std::string_view text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

std::string page_remark(const Word& word) {
  const std::string remark(word.remark);
  if (word.fate == Fate::kMissing) return "not in lmlaunch: " + remark;
  if (word.fate == Fate::kRefused) return "another task: " + remark;
  return word.fate == Fate::kUnneeded ? "not needed: " + remark : remark;
}

}  // namespace

std::string_view project_name(Project project) {
  return row_of(project).name;
}

std::vector<const Word*> words_with_keys() {
  std::vector<const Word*> out;
  for (const ProjectRow& row : projects()) {
    for (const std::span<const Word> table : row.own) {
      for (const Word& word : table) {
        if (word.fate == Fate::kKey && !is_pattern(word)) out.push_back(&word);
      }
    }
  }
  return out;
}

const Word* find_word(Project project, std::string_view theirs) {
  const ProjectRow& row = row_of(project);
  for (const bool patterns : {false, true}) {
    if (const Word* word = find_in(row.own, theirs, patterns)) return word;
    if (const Word* word = find_in(row.also, theirs, patterns)) return word;
  }
  return nullptr;
}

bool has_inner_words(Project project, std::string_view theirs) {
  const std::string inner = std::string(theirs) + ".";
  const ProjectRow& row = row_of(project);
  for (const auto& tables : {row.own, row.also}) {
    for (const std::span<const Word> table : tables) {
      if (std::ranges::any_of(table, [&](const Word& word) { return word.theirs.starts_with(inner); }))
        return true;
    }
  }
  return false;
}

std::string word_answer(const Word& word) {
  const std::string remark(word.remark);
  if (word.fate == Fate::kKey)
    return "; did you mean " + here(word) + "?" + (remark.empty() ? "" : " (" + remark + ")");
  if (word.fate == Fate::kUnneeded) return "; not needed here: " + remark;
  return "; not in lmlaunch: " + remark;
}

std::string word_answer(std::string_view table, std::string_view key) {
  const std::string full = std::string(table) + "." + std::string(key);
  for (const bool patterns : {false, true}) {
    for (const ProjectRow& row : projects()) {
      // Our tables and theirs have the same names: their "optimizer.*" would answer every misspelling in
      // ours.
      if (const Word* word = patterns ? nullptr : find_in(row.own, full, false)) return word_answer(*word);
      const Word* word = find_in(row.own, key, patterns);
      if (word != nullptr && (!patterns || begins_apart(*word, key))) return word_answer(*word);
    }
  }
  // The last part of a key in a table, such as lora_attn_modules.
  for (const Word* word : words_with_keys()) {
    if (key.size() >= kTelling && last_part(word->theirs) == key) return word_answer(*word);
  }
  for (const ProjectRow& row : projects()) {
    for (const std::span<const Word> words : row.own) {
      for (const Word& word : words) {
        if (key.size() >= kTelling && !is_pattern(word) && last_part(word.theirs) == key)
          return word_answer(word);
      }
    }
  }
  return "";
}

std::string coming_from_page() {
  std::string out = R"(# Coming from another trainer

`lmlaunch init --from FILE` reads the file that another trainer is started with (YAML or JSON) and writes a configuration. Every key
becomes a setting, or is named in it with the reason why it does not: not needed here, or not in lmlaunch. A file for another task,
such as preference tuning, is refused.

```
echo '{"model_name_or_path": "build/quickstart/model", "dataset_name": "build/quickstart/train.jsonl", "learning_rate": 2e-5}' > sft.json
lmlaunch init --from sft.json -o from-sft.toml
lmlaunch plan from-sft.toml
```

`--from` may be given several times: a recipe, then the DeepSpeed or accelerate file that belongs to it. MODEL and DATA may follow,
where the files name none or others are wanted. A key of another trainer inside a configuration is answered from the same table.

The tables below are printed by `lmlaunch init --words`. A `*` stands for any rest of a key, a dot for a table inside a table.
)";
  for (const ProjectRow& row : projects()) {
    out += "\n## " + std::string(row.name) + "\n\n" + std::string(row.about) + "\n\n";
    out += "| there | here | |\n|---|---|---|\n";
    for (const std::span<const Word> table : row.own) {
      for (const Word& word : table)
        out += "| `" + std::string(word.theirs) + "` | " + cell(here(word)) + " | " +
               cell(page_remark(word)) + " |\n";
    }
  }
  return out;
}

}  // namespace lm
