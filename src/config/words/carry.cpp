#include <algorithm>
#include <string>

#include "base/name_pattern.h"
#include "config/config_text.h"
#include "config/words/carry_data.h"
#include "config/words/draft.h"
#include "config/words/tables.h"
#include "config/words/values.h"

namespace lm {
namespace {

using Json = nlohmann::json;

// A number of steps; a fraction would need the run's length, which a file does not have.
void every(const Word& word, const Json& value, Draft& draft) {
  const auto number = as_number(value);
  if (!number || *number <= 0) return;
  if (*number >= 1) return draft.set(std::string(word.ours), whole_text(*number));
  draft.missing("a share of the run; " + std::string(word.ours) + " counts steps");
}

void adapter(const Json& value, Draft& draft) {
  const std::string name = lower(text_of(value));
  // The last four are peft's.
  constexpr std::pair<std::string_view, std::string_view> kMethods[] = {
      {"full", "full"},        {"lora", "lora"},           {"qlora", "qlora"},
      {"ia3", "ia3"},          {"ln_tuning", "norms"},     {"prefix_tuning", "prefix"},
      {"p_tuning", "ptuning"}, {"prompt_tuning", "prompt"}};
  const auto* const found =
      std::ranges::find(kMethods, name, &std::pair<std::string_view, std::string_view>::first);
  if (found != std::end(kMethods)) {
    // A file of adapters does not say whether another one has quantized the base.
    if (draft.method != "qlora" || found->second != "lora") draft.method = found->second;
    draft.of["train.method"].push_back(draft.at);
    draft.done = true;
  } else if (!is_off(value)) {
    draft.missing("train.method has full, lora, qlora, ia3, norms, prefix, prompt and ptuning");
  }
}

void stage(const Json& value, Draft& draft) {
  const std::string name = lower(text_of(value));
  if (name == "sft") return draft.unneeded("supervised fine-tuning is what lmlaunch does");
  if (name == "pt") return draft.set("data.format", "\"text\"");
  if (name == "rm") return draft.refuse("stage \"rm\": " + std::string(why::kReward));
  draft.refuse("stage \"" + name + "\": " + std::string(why::kPreference));
}

void dtype(const Json& value, Draft& draft) {
  const std::string name = lower(text_of(value));
  if (contains(name, "bf16") || contains(name, "bfloat16")) return draft.set("model.dtype", "\"bf16\"");
  if (name == "fp32" || contains(name, "float32") || name == "no")
    return draft.set("model.dtype", "\"fp32\"");
  if (name == "fp16" || name == "half" || contains(name, "float16"))
    return draft.set("model.dtype", "\"fp16\"");
  if (name == "auto" || is_off(value)) return;
  draft.missing("\"" + name + "\": model.dtype has bf16, fp16 and fp32, and bf16 is taken");
}

void quant_type(const Json& value, Draft& draft) {
  const std::string name = lower(text_of(value));
  // load_in_4bit beside it decides whether there is quantization.
  if ((name == "fp4" || name == "nf4") && draft.settings.contains("model.quantize"))
    return draft.set("model.quantize", quote(name));
  if (name == "nf4" || is_off(value)) return draft.unneeded("4 bits means nf4");
  if (name == "fp4") return draft.set("model.quantize", "\"fp4\"");
  draft.missing("\"" + name + "\": model.quantize has nf4, fp4 and int8");
}

bool is_expression(const std::string& name) {
  return name.find_first_of("\\*()|^$?[+{") != std::string::npos;
}

// lora.targets or lora.exclude. A text that is no name is a regular expression of whole paths.
void targets(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value)) return;
  const std::string key(word.ours);
  if (value.is_string() && is_expression(text_of(value))) {
    const std::string pattern = "regex:^(?:" + text_of(value) + ")$";
    if (!NamePattern::mistake(pattern).empty())
      return draft.missing(key + " takes regular expressions of ECMAScript, and this is none");
    return draft.set(key, value_text(std::vector<std::string>{pattern}));
  }
  const std::vector<std::string> names = names_of(value);
  const bool all = value == true || (names.size() == 1 && (names[0] == "all" || names[0] == "all-linear"));
  if (all) return draft.set(key, "[\"all-linear\"]");
  if (std::ranges::any_of(names, is_expression))
    return draft.missing("a list has names such as q_proj, and these are none");
  draft.set(key, value_text(names));
}

void layers(const Word& word, const Json& value, Draft& draft) {
  std::vector<int64_t> numbers;
  for (const Json& layer : value.is_array() ? value : Json::array({value}))
    if (layer.is_number_integer()) numbers.push_back(layer.get<int64_t>());
  if (!numbers.empty()) draft.set(std::string(word.ours), value_text(numbers));
}

// rank_pattern and alpha_pattern: a key is a regular expression of the end of a path behind a point.
void module_values(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value) || !value.is_object()) return;
  std::string out;
  for (const auto& [name, number] : value.items()) {
    const std::string pattern = is_expression(name) ? "regex:(?:^|[.])(?:" + name + ")$" : name;
    if (!number.is_number() || !NamePattern::mistake(pattern).empty())
      return draft.missing(std::string(word.ours) + " takes names, or regular expressions of ECMAScript");
    out += (out.empty() ? "{" : ", ") + quote(pattern) + " = " + toml_of(number);
  }
  draft.set(std::string(word.ours), out + "}");
}

// modules_to_save: ends of paths, without a point before them.
void also(const Json& value, Draft& draft) {
  if (is_off(value)) return;
  std::vector<std::string> names = names_of(value);
  std::ranges::replace(names, "norm", "norms");
  if (!names.empty()) draft.set("lora.also", value_text(names));
}

void tokens(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value)) return;
  if (!value.is_array()) return draft.missing("lora.tokens is a list: rows of the embedding");
  layers(word, value, draft);
}

// Texts, which may have any characters.
void new_tokens(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value)) return;
  const std::vector<std::string> names = names_of(value);
  if (!names.empty()) draft.set(std::string(word.ours), value_text(names));
}

void modules(const Word& word, const Json& value, Draft& draft) {
  if (word.ours == "lora.layers") return layers(word, value, draft);
  if (word.ours == "lora.also") return also(value, draft);
  if (word.ours == "lora.tokens") return tokens(word, value, draft);
  if (word.ours == "model.add_tokens") return new_tokens(word, value, draft);
  const bool values = word.ours == "lora.ranks" || word.ours == "lora.alphas";
  values ? module_values(word, value, draft) : targets(word, value, draft);
}

void tune_targets(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value)) return;
  draft.of["lora.targets"].push_back(draft.at);
  draft.done = true;
  std::vector<std::string> names = {"gate_proj", "up_proj", "down_proj"};
  if (word.how == How::kTuneTargets) names = names_of(value);
  for (const std::string& name : names) draft.targets.push_back(name == "output_proj" ? "o_proj" : name);
}

void fsdp(const Json& value, Draft& draft) {
  const std::string all = lower(value.dump());
  if (contains(all, "no_shard")) return draft.set("zero.stage", "0");
  if (contains(all, "hybrid_shard")) {
    draft.set("zero.group", "\"machine\"");
    return draft.set("zero.stage", contains(all, "zero2") ? "2" : "3");
  }
  if (contains(all, "grad_op") || value == false) return draft.set("zero.stage", "2");
  if (contains(all, "full_shard") || contains(all, "auto_wrap") || value == true)
    return draft.set("zero.stage", "3");
  if (!is_off(value)) draft.missing("zero.stage has 0 to 3");
}

void tier_id(const Word& word, const Json& value, Draft& draft) {
  const std::string name = lower(text_of(value));
  const std::string key(word.ours);
  if (name == "cpu") return draft.set(key, "\"host\"");
  if (name == "nvme") return draft.set(key, "\"nvme\"");
  if (!is_off(value)) draft.missing(key + " has none, host and nvme");
}

void fsdp_offload(const Json& value, Draft& draft) {
  if (is_off(value)) return;
  for (const char* key : {"offload.weights", "offload.optimizer"}) draft.set(key, "\"host\"");
}

void checkpointing(const Json& value, Draft& draft) {
  if (is_off(value)) return;
  draft.set("train.recompute", "\"block\"");
  const std::string how = lower(text_of(value));
  if (contains(how, "offload") || how == "unsloth") draft.set("offload.activations", "\"host\"");
}

void clip(const Json& value, Draft& draft) {
  const auto most = as_number(value);
  if (most && *most > 0) return draft.set("train.max_grad_norm", toml_of(value));
  if (most || value.is_null()) draft.set("optimizer.clip", "\"none\"");
}

void saving(const Json& value, Draft& draft) {
  const std::string how = lower(text_of(value));
  if (how == "steps") return draft.unneeded("checkpoint.every counts steps, or time");
  if (how == "best") return draft.set("checkpoint.keep_best", "true");
  if (is_off(value)) return draft.set("checkpoint.every", "0");
  draft.missing("checkpoint.every counts steps, or time; the default is 30 minutes");
}

void strategy(const Json& value, Draft& draft) {
  const std::string how = lower(text_of(value));
  if (how == "steps") return draft.unneeded("train.eval_every counts steps");
  if (!is_off(value)) draft.missing("train.eval_every counts steps; the default evaluates before and after");
}

// Sets a list with one name; names from other keys stay.
void also_to(const std::string& list, Draft& draft) {
  const auto before = draft.settings.find("log.to");
  if (before == draft.settings.end()) return draft.set("log.to", list);
  std::string all = before->second.value;
  const std::string name = list.substr(1, list.size() - 2);
  if (!contains(all, name)) all = all.substr(0, all.size() - 1) + ", " + name + "]";
  draft.set("log.to", all);
}

void report_to(const Json& value, Draft& draft) {
  const std::string all = lower(value.dump());
  bool some = false;
  for (const auto& target : EnumNames<LogTarget>::kAll) {
    const std::string name = quote(target.name);
    if (!contains(all, name)) continue;
    also_to("[" + name + "]", draft);
    some = true;
  }
  if (!some && !is_off(value)) draft.unneeded("curves are in the run's metrics.jsonl and report.html");
}

void eval_share(const Word& word, const Json& value, Draft& draft) {
  const auto share = as_number(value);
  if (!share || *share <= 0) return;
  if (*share < 1) return draft.set(std::string(word.ours), toml_of(value));
  draft.missing("a number of rows; data.eval_fraction is a share of them");
}

void steps(const Json& value, Draft& draft) {
  const auto number = as_number(value);
  if (number && *number >= 1) draft.set("train.steps", whole_text(*number));
}

void bits(const Json& value, Draft& draft) {
  const auto number = as_number(value);
  if (number == 4.0) return draft.set("model.quantize", "\"nf4\"");
  if (number == 8.0) return draft.set("model.quantize", "\"int8\"");
  if (!is_off(value)) draft.missing("model.quantize has 4 and 8 bits");
}

void lora_start(const Json& value, Draft& draft) {
  const std::string name = lower(text_of(value));
  if (name == "loftq") return draft.set("lora.start", "\"loftq\"");
  if (name == "pissa" || name.starts_with("pissa_niter_")) return draft.set("lora.start", "\"pissa\"");
  if (value != true && name != "gaussian" && !is_off(value))
    draft.missing("lora.start has zero, loftq and pissa");
}

void other_file(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value)) return;
  if (word.theirs == "chat_template_jinja" && value.is_string()) {
    const std::string path = value.get<std::string>();
    if (!contains(path, "{")) return draft.set("data.chat_template", quote(path));
    return draft.missing("data.chat_template names a file: write the template into one");
  }
  draft.missing("its settings: `lmlaunch init --from THIS --from THAT.json` reads both");
}

// "torchtune.models.llama3_2.qlora_llama3_2_1b", "bitsandbytes.optim.PagedAdamW8bit", "WarmupCosineLR".
void component(const Word& word, const Json& value, Draft& draft) {
  const std::string name = text_of(value), last = lower(last_of(name));
  if (is_off(value) || name == "auto") return;
  if (word.how == How::kTuneModel) {
    draft.method = last.starts_with("qlora")                              ? "qlora"
                   : last.starts_with("lora") || last.starts_with("dora") ? "lora"
                                                                          : "full";
    draft.of["train.method"].push_back(draft.at);
    draft.done = true;
  } else if (word.how == How::kTuneOptimizer) {
    const bool plain = last == "adamw" || last == "adam" || last == "lion" || last == "sgd" || last == "muon";
    draft.set("optimizer.name", quote(plain ? (last == "adam" ? "adamw" : last) : name));
  } else {
    const char* ours = contains(last, "cosine")                                 ? "cosine"
                       : contains(last, "decay") || contains(last, "linear")    ? "linear"
                       : contains(last, "warmup") || contains(last, "constant") ? "constant_with_warmup"
                                                                                : "";
    if (*ours) return draft.set("optimizer.schedule", quote(ours));
    draft.missing("not a schedule of optimizer.schedule");
  }
}

// Numbers that several keys determine together.
void part(const Word& word, const Json& value, double least, std::optional<double>& out, Draft& draft) {
  const auto number = as_number(value);
  if (!number || *number < least) return;
  out = number;
  draft.of[std::string(word.ours)].push_back(draft.at);
  draft.done = true;
}

void of_numbers(const Word& word, const Json& value, Draft& draft) {
  const auto number = as_number(value);
  switch (word.how) {
    case How::kMicro:
      return part(word, value, 1, draft.micro, draft);
    case How::kAccumulation:
      return part(word, value, 1, draft.accumulation, draft);
    case How::kProcesses:
      return part(word, value, 1, draft.processes, draft);
    case How::kBeta1:
      return part(word, value, 0, draft.beta1, draft);
    case How::kBeta2:
      return part(word, value, 0, draft.beta2, draft);
    case How::kTuneSteps:
      return part(word, value, 1, draft.steps_per_epoch, draft);
    case How::kGlobal:
      if (number) draft.set("train.global_batch", toml_of(value));
      return;
    default:
      if (number && *number > 0) draft.set("optimizer.warmup", toml_of(value));
  }
}

void as_it_stands(const Word& word, const Json& value, Draft& draft) {
  if (value == "auto" || value == "" || value.is_object()) return;
  const std::string key(word.ours);
  draft.set(key, key == "offload.paths" ? value_text(names_of(value)) : toml_of(value));
}

void when_on(const Word& word, const Json& value, Draft& draft) {
  if (is_off(value)) return;
  if (word.ours == "log.to") return also_to(std::string(word.text), draft);
  if (word.ours != "train.method") return draft.set(std::string(word.ours), std::string(word.text));
  adapter(std::string(word.text.substr(1, word.text.size() - 2)), draft);
}

void fp16(const Json& value, Draft& draft) {
  if (!is_off(value) && value != "auto") draft.set("model.dtype", "\"fp16\"");
}

void by_key(const Word& word, const Json& value, Draft& draft) {
  switch (word.how) {
    case How::kValue:
      return as_it_stands(word, value, draft);
    case How::kWhenOn:
      return when_on(word, value, draft);
    case How::kAdapter:
      return adapter(value, draft);
    case How::kBits:
      return bits(value, draft);
    case How::kCheckpointing:
      return checkpointing(value, draft);
    case How::kClip:
      return clip(value, draft);
    case How::kDType:
      return dtype(value, draft);
    case How::kEvalShare:
      return eval_share(word, value, draft);
    case How::kEvery:
      return every(word, value, draft);
    case How::kFp16:
      return fp16(value, draft);
    case How::kFsdp:
      return fsdp(value, draft);
    case How::kFsdpOffload:
      return fsdp_offload(value, draft);
    case How::kTier:
      return tier_id(word, value, draft);
    case How::kLoraStart:
      return lora_start(value, draft);
    case How::kOtherFile:
      return other_file(word, value, draft);
    case How::kQuantType:
      return quant_type(value, draft);
    case How::kReport:
      return report_to(value, draft);
    case How::kSaving:
      return saving(value, draft);
    case How::kStage:
      return stage(value, draft);
    case How::kSteps:
      return steps(value, draft);
    case How::kStrategy:
      return strategy(value, draft);
    case How::kTargets:
      return modules(word, value, draft);
    case How::kTuneMlp:
    case How::kTuneTargets:
      return tune_targets(word, value, draft);
    case How::kTuneModel:
    case How::kTuneOptimizer:
    case How::kTuneSchedule:
      return component(word, value, draft);
    case How::kSources:
      return carry_sources(value, draft);
    case How::kSourceType:
      return carry_source_type(value, draft);
    case How::kSourceMessages:
      return carry_source_messages(value, draft);
    case How::kSourceSplit:
      return carry_source_split(value, draft);
    case How::kTuneData:
      return carry_tune_data(value, draft);
    case How::kEvalNames:
    case How::kSourceField:
    case How::kSourceFiles:
    case How::kSourceName:
    case How::kSourceWeight:
      return carry_source_part(word, value, draft);
    case How::kAccumulation:
    case How::kBeta1:
    case How::kBeta2:
    case How::kGlobal:
    case How::kMicro:
    case How::kProcesses:
    case How::kTuneSteps:
    case How::kWarmup:
      return of_numbers(word, value, draft);
  }
}

// An entry of data has several keys: those that made data.train are kept with it.
void carry_key(const Word& word, const Json& value, Draft& draft) {
  const size_t told = draft.out.missing.size() + draft.out.unneeded.size();
  by_key(word, value, draft);
  const bool of_data = draft.done && told == draft.out.missing.size() + draft.out.unneeded.size() &&
                       word.ours.starts_with("data.");
  std::vector<std::string>& from = draft.of[std::string(word.ours)];
  if (of_data && std::ranges::find(from, draft.at) == from.end()) from.push_back(draft.at);
}

}  // namespace

void carry(const Word& word, const Json& value, Draft& draft) {
  switch (word.fate) {
    case Fate::kKey:
      return carry_key(word, value, draft);
    case Fate::kUnneeded:
      return draft.unneeded(word.remark);
    case Fate::kMissing:
      if (!is_off(value)) draft.missing(word.remark);
      return;
    case Fate::kRefused:
      if (!is_off(value)) draft.refuse(std::string(word.theirs) + ": " + std::string(word.remark));
  }
}

}  // namespace lm
