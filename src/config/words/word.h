// Keys of other trainers, and the name of each here or why there is none. One table (a file for each project
// in this folder) serves the answers to unknown keys, the page docs/coming-from.md and `lmlaunch init
// --from`. Pure tables; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

enum class Project : uint8_t {
  kNobody,  // misspellings, and keys of several projects
  kTrainer,
  kPeft,
  kAxolotl,
  kLlamaFactory,
  kTorchtune,
  kUnsloth,
  kDeepSpeed,
  kAccelerate,
};

enum class Fate : uint8_t {
  kKey,       // one of our keys sets it
  kUnneeded,  // lmlaunch always does it, or decides it itself: nothing to set
  kMissing,   // not supported: a run differs by it
  kRefused,   // another task than fine-tuning on examples: such a file is not translated
};

// How a value is translated (translate.cpp).
enum class How : uint8_t {
  kValue,   // unchanged
  kWhenOn,  // Word::text, unless the value is off
  kAccumulation,
  kAdapter,
  kBeta1,
  kBeta2,
  kBits,
  kCheckpointing,
  kClip,
  kDType,
  kEvalNames,
  kEvalShare,
  kEvery,
  kFp16,
  kFsdp,
  kFsdpOffload,
  kGlobal,
  kTier,
  kLoraStart,
  kMicro,
  kOtherFile,
  kProcesses,
  kQuantType,
  kReport,
  kSaving,
  kSources,
  kSourceField,
  kSourceFiles,
  kSourceMessages,
  kSourceName,
  kSourceSplit,
  kSourceType,
  kSourceWeight,
  kStage,
  kSteps,
  kStrategy,
  kTargets,
  kTuneData,
  kTuneMlp,
  kTuneModel,
  kTuneOptimizer,
  kTuneSchedule,
  kTuneSteps,
  kTuneTargets,
  kWarmup,
};

struct Word {
  std::string_view theirs;  // inner tables with dots; a "*" at the end is a wildcard
  Fate fate;
  std::string_view ours;    // "optimizer.lr"
  std::string_view remark;  // beside the key, or why there is none
  How how = How::kValue;
  std::string_view text = {};  // for How::kWhenOn: the value here, as TOML
};

constexpr Word to(std::string_view theirs, std::string_view ours, How how = How::kValue,
                  std::string_view remark = "") {
  return {theirs, Fate::kKey, ours, remark, how};
}
constexpr Word when_on(std::string_view theirs, std::string_view ours, std::string_view text,
                       std::string_view remark = "") {
  return {theirs, Fate::kKey, ours, remark, How::kWhenOn, text};
}
constexpr Word unneeded(std::string_view theirs, std::string_view why) {
  return {theirs, Fate::kUnneeded, "", why};
}
constexpr Word missing(std::string_view theirs, std::string_view why) {
  return {theirs, Fate::kMissing, "", why};
}
constexpr Word refused(std::string_view theirs, std::string_view why) {
  return {theirs, Fate::kRefused, "", why};
}

std::string_view project_name(Project project);
// The word for a key of the project's file, such as "optimizer.params.lr"; null: unknown.
const Word* find_word(Project project, std::string_view theirs);
// Whether words of the project begin with this table's name.
bool has_inner_words(Project project, std::string_view theirs);
// Words of all projects that have a key here.
std::vector<const Word*> words_with_keys();

// The answer to an unknown key of a configuration, "; did you mean `optimizer.lr`?"; "" if there is none.
std::string word_answer(std::string_view table, std::string_view key);
std::string word_answer(const Word& word);

// docs/coming-from.md.
std::string coming_from_page();

}  // namespace lm
