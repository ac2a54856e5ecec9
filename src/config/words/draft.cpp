#include "config/words/draft.h"

#include <algorithm>

#include "base/error.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "config/words/values.h"

namespace lm {

void Draft::set(const std::string& key, const std::string& value) {
  Translated::Setting& setting = settings[key];
  setting.key = key;
  setting.value = value;
  setting.from.push_back(at);
  done = true;
}

void Draft::missing(std::string_view why) {
  out.missing.push_back({at, std::string(why)});
  done = true;
}

void Draft::unneeded(std::string_view why) {
  out.unneeded.push_back({at, std::string(why)});
  done = true;
}

void Draft::refuse(std::string_view why) const {
  throw Error(Exit::kConfig, {.area = "INIT-23",
                              .what = "this file sets what lmlaunch does not support: " + std::string(why),
                              .place = place,
                              .next = "for fine-tuning on examples with its other settings, remove that key",
                              .kept = "nothing was written"});
}

ForeignSource& Draft::source() {
  if (sources.empty()) sources.emplace_back();
  return sources.back();
}

namespace {

void put(Draft& draft, const std::string& key, const std::string& value) {
  draft.settings[key] = {key, value, draft.of[key]};
}

// Keys of a setting that is given otherwise are not needed.
void leave(Draft& draft, const std::string& key, const std::string& why) {
  for (const std::string& from : draft.of[key]) draft.out.unneeded.push_back({from, why});
  draft.of[key].clear();
}

void settle_batch(Draft& draft) {
  if (draft.micro && *draft.micro >= 1) put(draft, "train.micro_batch", whole_text(*draft.micro));
  const bool given = draft.micro || draft.accumulation || draft.processes;
  auto& from = draft.of["train.global_batch"];
  if (draft.settings.contains("train.global_batch")) {
    for (const std::string& one : from) draft.out.unneeded.push_back({one, "train.global_batch is given"});
    return;
  }
  if (!given) return;
  // Defaults of TrainingArguments; files of the other projects set them.
  const double sequences = std::max(1.0, draft.micro.value_or(draft.project == Project::kTrainer ? 8 : 1)) *
                           std::max(1.0, draft.accumulation.value_or(1)) *
                           std::max(1.0, draft.processes.value_or(1));
  if (draft.micro)
    from.insert(from.begin(), draft.of["train.micro_batch"].begin(), draft.of["train.micro_batch"].end());
  put(draft, "train.global_batch", whole_text(sequences));
  draft.out.of_one_device = !draft.processes;
}

void settle_betas(Draft& draft) {
  if (draft.beta1 || draft.beta2)
    put(draft, "optimizer.betas",
        value_text(std::vector{draft.beta1.value_or(0.9), draft.beta2.value_or(0.999)}));
}

void settle_length(Draft& draft) {
  const auto epochs = draft.settings.find("train.epochs");
  if (draft.steps_per_epoch && *draft.steps_per_epoch >= 1) {
    const double times =
        epochs == draft.settings.end() ? 1 : as_number(nlohmann::json(epochs->second.value)).value_or(1);
    put(draft, "train.steps", whole_text(std::max(1.0, *draft.steps_per_epoch * times)));
  }
  if (epochs == draft.settings.end() || !draft.settings.contains("train.steps")) return;
  for (const std::string& from : epochs->second.from)
    draft.out.unneeded.push_back({from, "train.steps ends the run"});
  draft.settings.erase(epochs);
}

void settle_method(Draft& draft) {
  auto& settings = draft.settings;
  if (!draft.targets.empty()) put(draft, "lora.targets", value_text(draft.targets));
  if (draft.method) put(draft, "train.method", quote(*draft.method));
  const auto method = settings.find("train.method");
  if (method != settings.end() && method->second.value != quote("full")) return;
  std::erase_if(settings, [&](const auto& one) {
    const bool of_adapters = one.first.starts_with("lora.");
    for (const std::string& from : of_adapters ? one.second.from : std::vector<std::string>())
      draft.out.unneeded.push_back({from, "no adapter is asked for: all weights are trained"});
    return of_adapters;
  });
}

void settle_data(Draft& draft, const std::vector<std::string>& data) {
  std::vector<std::string> names;
  std::vector<double> weights;
  std::optional<std::string> format;
  ColumnNames columns;
  bool weighted = false;
  for (const ForeignSource& source : draft.sources) {
    const bool by_files = !source.files.empty();
    // Files of a hub data set are taken for that data set's, as far as the name tells.
    const bool hub = source.name.find('/') != std::string::npos && source.name.find('.') == std::string::npos;
    std::vector<std::string> entries =
        by_files && !hub ? source.files : std::vector<std::string>{source.name};
    for (const std::string& entry : entries) {
      if (entry.empty()) continue;
      names.push_back(entry);
      weights.push_back(source.weight.value_or(1));
      weighted |= source.weight.has_value();
    }
    format = format && *format != source.format ? "" : source.format;
    columns.insert(source.columns.begin(), source.columns.end());
  }
  if (!data.empty()) {
    leave(draft, "data.train", "DATA is given");
    leave(draft, "data.weights", "DATA is given");
    names = data;
  }
  weighted = weighted && data.empty();
  if (!names.empty()) put(draft, "data.train", value_text(names));
  if (weighted) put(draft, "data.weights", value_text(weights));
  if (format && !format->empty() && columns.empty()) put(draft, "data.format", quote(*format));
  if (!columns.empty()) put(draft, "data.columns", value_text(columns));
  if (!draft.eval.empty()) put(draft, "data.eval", value_text(draft.eval));
  for (const char* key : {"data.train", "data.weights", "data.format", "data.columns"}) {
    if (!draft.settings.contains(key)) leave(draft, key, "recognised by the columns");
  }
}

// Keys on which others depend first, then all in their order.
std::vector<std::string> order_of_trial() {
  std::vector<std::string> keys = {"model.path",     "data.train",         "train.method",
                                   "optimizer.name", "optimizer.schedule", "offload.paths"};
  for (const KeyText& key : known_keys()) {
    const std::string name = key.table + "." + key.name;
    if (std::ranges::find(keys, name) == keys.end()) keys.push_back(name);
  }
  return keys;
}

// Adds one setting after the other, and leaves out those that the configuration refuses, with the reason.
std::vector<Translated::Setting> accepted(Draft& draft) {
  std::string text;
  std::map<std::string, Translated::Setting> kept;
  for (const std::string& key : order_of_trial()) {
    const auto found = draft.settings.find(key);
    if (found == draft.settings.end()) continue;
    const std::string line = key + " = " + found->second.value + "\n";
    try {
      if (key != "model.path") parse_config(text + line, "", {});
      text += line;
      kept[key] = found->second;
    } catch (const Error& error) {
      if (key == "data.train") throw;
      for (const std::string& from : found->second.from)
        draft.out.missing.push_back({from, error.text().what});
    }
  }
  std::vector<Translated::Setting> out;
  for (const auto& [table, name, value, tag] : list_keys(parse_config(text, "", {}))) {
    const auto found = kept.find(table + "." + name);
    if (found == kept.end()) continue;
    out.push_back(found->second);
    kept.erase(found);  // another rule may have a key of the same name
  }
  return out;
}

// Defaults of their program, if ours differ.
void settle_defaults(Draft& draft) {
  const auto add = [&](const std::string& key, const std::string& value) {
    if (!draft.settings.contains(key)) draft.settings[key] = {key, value, {"the default there"}};
  };
  const bool transformers = draft.project == Project::kTrainer || draft.project == Project::kLlamaFactory;
  const bool trains = draft.settings.contains("optimizer.lr");  // otherwise a file of adapters or of hardware
  if (transformers && trains && !draft.settings.contains("train.steps")) add("train.epochs", "3");
  if (draft.project == Project::kAxolotl) add("optimizer.schedule", quote("cosine"));
  if (draft.project == Project::kTorchtune) {
    add("optimizer.schedule", quote("constant"));
    add("optimizer.weight_decay", "0.01");
    if (!draft.settings.contains("train.max_grad_norm")) add("optimizer.clip", quote("none"));
  }
  const auto rank = draft.settings.find("lora.r");
  if (draft.project == Project::kLlamaFactory && rank != draft.settings.end())
    add("lora.alpha", std::to_string(2 * std::atoll(rank->second.value.c_str())));
  const auto method = draft.settings.find("train.method");
  const bool adapters = method != draft.settings.end() && method->second.value != quote("full");
  if (draft.project == Project::kTrainer && adapters) {
    add("lora.r", "16");
    add("lora.alpha", "32");
    add("lora.dropout", "0.05");
  }
  if (draft.project == Project::kPeft) add("lora.alpha", "8");
}

}  // namespace

Translated settle(Draft draft, const std::string& model, const std::vector<std::string>& data) {
  settle_batch(draft);
  settle_betas(draft);
  settle_length(draft);
  settle_method(draft);
  settle_data(draft, data);
  settle_defaults(draft);
  if (!model.empty()) {
    draft.of["model.path"] = draft.settings["model.path"].from;
    leave(draft, "model.path", "MODEL is given");
    put(draft, "model.path", quote(model));
  }
  for (const char* key : {"model.path", "data.train"}) {
    if (!draft.settings.contains(key))
      throw Error(Exit::kUsage, {.area = "INIT-24",
                                 .what = std::string("nothing names ") + key,
                                 .place = draft.place,
                                 .next = "name them behind it: lmlaunch init --from FILE MODEL DATA",
                                 .kept = "nothing was written"});
  }
  draft.out.settings = accepted(draft);
  return std::move(draft.out);
}

}  // namespace lm
