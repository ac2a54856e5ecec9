#include "launcher/report/card.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/file.h"
#include "base/hub_snapshot.h"
#include "base/log.h"
#include "launcher/report/report.h"

namespace lm {
namespace {

// Indented, so that Markdown shows it verbatim.
std::string verbatim(const std::string& text) {
  std::string out;
  for (size_t from = 0; from < text.size();) {
    const size_t to = std::min(text.find('\n', from), text.size());
    out += "    " + text.substr(from, to - from) + "\n";
    from = to + 1;
  }
  return out;
}

std::string figure(const Json& value) {
  return value.is_null() ? "unknown" : value.dump();
}

std::string figures(const Json& record) {
  const Json& total = record.at("measured");
  std::string out = "steps: " + record.at("status").at("step").dump() + "\n";
  out += fmt::format("tokens: {}\n", static_cast<int64_t>(total.at("tokens").get<double>()));
  out += "seconds in steps: " + figure(total.at("seconds")) + "\n";
  out += "training loss at the last step: " + figure(total.at("last_loss")) + "\n";
  for (const Json& eval : record.at("eval")) {
    const Json& points = eval.at("points");
    const std::string set = eval.at("set").get<std::string>();
    if (points.size() > 1)
      out += "eval loss" + (set.empty() ? "" : " of " + set) + ": " + figure(points.front().at(1)) +
             " before, " + figure(points.back().at(1)) + " after\n";
  }
  return out;
}

}  // namespace

std::string model_card(const Json& record, bool adapter) {
  const std::string revision = record.value("revision", "");
  std::string base = record.at("base").get<std::string>();
  if (const auto hub = parse_hub_name(base); hub && !revision.empty()) base = hub->repository();
  const bool lora = record.at("lora").get<bool>();
  const std::string method = record.value("method", lora ? "lora" : "full");
  const bool other =
      method == "ia3" || method == "norms" || method == "prefix" || method == "prompt" || method == "ptuning";
  const std::string kind = method == "ia3"       ? "n IA3"
                           : method == "norms"   ? "n LN tuning"
                           : method == "prefix"  ? " prefix tuning"
                           : method == "prompt"  ? " prompt tuning"
                           : method == "ptuning" ? " P-tuning"
                                                 : " LoRA";
  const auto quoted = [](const std::string& text) {
    return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
  };
  std::string settings;
  bool scores = false;  // train.objective has the default unless a head of scores is trained
  for (const Json& key : record.at("settings")) {
    scores = scores || key.at(0) == "train.objective";
    settings += key.at(0).get<std::string>() + " = " + key.at(2).get<std::string>() + "\n";
  }
  std::string out = "---\nbase_model: " + quoted(base) +
                    "\nlibrary_name: " + (adapter ? "peft" : "transformers") +
                    "\npipeline_tag: " + (scores ? "text-classification" : "text-generation") +
                    "\ntags:\n- lmlaunch\n" + (lora ? "- lora\n" : "") + "---\n\n";
  out += (adapter         ? "A" + kind + " adapter for"
          : lora || other ? "With a" + kind + " adapter merged into its weights:"
                          : "All weights trained:") +
         " the model below, by lmlaunch " + record.at("version").get<std::string>() +
         ". Before you publish it add its licence, what it is for and what it cannot do.\n\n" +
         verbatim(base + (revision.empty() ? "" : ", revision " + revision));
  out += "\n## Figures\n\n" + verbatim(figures(record));
  const std::string data = record.at("data").get<std::string>();
  if (!data.empty()) out += "\n## Data\n\n" + verbatim(data);
  return out + "\n## Settings that differ from the defaults\n\n" + verbatim(settings);
}

void write_model_card(const std::string& directory, const std::string& run, bool adapter) {
  try {
    atomic_write_file(directory + "/README.md", model_card(RunReport(run).record(), adapter));
  } catch (const std::exception& error) {
    log_note("FILE-03", "the model has no card: " + std::string(error.what()));
  }
}

}  // namespace lm
