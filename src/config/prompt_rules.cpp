#include "config/prompt_rules.h"

#include <fmt/format.h>
#include <string>
#include <utility>

#include "config/config_names.h"
#include "config/config_text.h"

namespace lm {

std::vector<KeyRule> prompt_rules(const Config& config) {
  const PromptConfig &prompt = config.prompt, fresh;
  const Method method = config.train.method;
  const std::string here = "train.method = " + value_text(method);
  std::vector<KeyRule> out;
  const auto require = [&out](bool holds, const char* key, const char* other, std::string text) {
    out.push_back({holds, key, other, std::move(text)});
  };
  const auto unused = [&](const char* key, bool changed) {
    require(!changed, key, "train.method",
            std::string(key) + " is of virtual tokens, and " + here +
                " has none: leave it out, or set train.method = \"prefix\", \"prompt\" or \"ptuning\"");
  };
  if (!has_virtual_tokens(method)) {
    unused("prompt.length", prompt.length != fresh.length);
    unused("prompt.start", prompt.start != fresh.start);
    unused("prompt.hidden", prompt.hidden != fresh.hidden);
    return out;
  }
  const bool prefix = method == Method::kPrefix, encoder = method == Method::kPtuning;
  require(encoder || !prompt.hidden, "prompt.hidden", "train.method",
          "prompt.hidden is of the MLP of P-tuning, and " + here +
              " has none: leave it out, or set train.method = \"ptuning\"");
  require(!encoder || prompt.start == PromptStart::kNormal, "prompt.start", "train.method",
          "prompt.start = " + value_text(prompt.start) +
              " is of what the model reads, and with train.method = \"ptuning\" an MLP makes that: leave "
              "prompt.start out, or set train.method = \"prompt\"");
  require(prompt.start != PromptStart::kZero || prefix || encoder, "prompt.start", "train.method",
          "prompt.start = \"zero\" is for a prefix, and " + here +
              " would begin with equal tokens, which stay equal: set \"normal\" or \"vocabulary\"");
  require(prompt.start != PromptStart::kVocabulary || !prefix, "prompt.start", "train.method",
          "prompt.start = \"vocabulary\" takes embeddings, and " + here +
              " trains keys and values: set \"normal\" or \"zero\"");
  require(
      !encoder || config.lora.init.empty(), "lora.init", "train.method",
      "lora.init = " + value_text(config.lora.init) +
          " cannot be trained further by P-tuning: an adapter's file has the embeddings that the MLP has "
          "made, and not the MLP. Leave lora.init out, continue the run that trained it, or train the "
          "embeddings themselves: set train.method = \"prompt\", and peft_type = \"PROMPT_TUNING\" in its "
          "adapter_config.json");
  require(config.train.objective == ObjectiveChoice::kSft, "train.method", "train.objective",
          here + " and train.objective = " + value_text(config.train.objective) +
              ": virtual tokens beside a head of scores are not implemented; set train.method = \"lora\"");
  // A continued adapter brings its own number.
  if (!config.lora.init.empty() && !prompt.length_written) return out;
  const int64_t length = config.data.max_length;
  require(prompt.length + 2 <= length, "prompt.length", "data.max_length",
          fmt::format("prompt.length = {} leaves {} of data.max_length = {} tokens to a document, and it "
                      "needs two: lower prompt.length or raise data.max_length",
                      prompt.length, length - prompt.length, length));
  return out;
}

}  // namespace lm
