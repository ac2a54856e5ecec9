#include "launcher/planned_model.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "config/config_text.h"
#include "launcher/model_place.h"
#include "launcher/score_model.h"
#include "launcher/token_ids.h"
#include "plan/adapter.h"
#include "plan/parallel_experts.h"
#include "plan/parameter_groups.h"
#include "plan/planned_layout.h"
#include "spec/adapter_sites.h"
#include "spec/dropouts.h"
#include "spec/families/family.h"
#include "weights/adapter_files.h"
#include "weights/model_directory.h"

namespace lm {
namespace {

Error tokens_error(std::string what, const std::string& place, std::string next) {
  return setting_error("lora.tokens: " + std::move(what), place, std::move(next));
}

// A row that nothing trains stays what it began with.
void require_new_rows_trained(const std::vector<NewToken>& added, const AdapterSpec& adapter) {
  for (const NewToken& token : added) {
    if (std::ranges::find(adapter.tokens, token.id) != adapter.tokens.end()) continue;
    throw setting_error("model.add_tokens: the row of " + value_text(token.text) +
                            " would stay as it begins, since adapters leave the embedding alone",
                        "", "name it in lora.tokens, or set lora.also = [\"embed_tokens\", \"lm_head\"]");
  }
}

// Sets the tokens of an adapter, which has its own if it is continued.
void set_tokens(const Config& config, const PlannedModel& planned, AdapterSpec& adapter) {
  const ModelSpec& model = planned.spec;
  const std::vector<NewToken> added = planned.grown ? planned.grown->tokens : std::vector<NewToken>();
  const LoraConfig& lora = config.lora;
  const bool written = std::ranges::find(lora.written, "tokens") != lora.written.end();
  const bool continued = !lora.init.empty();
  if (!lora.tokens.empty() || (written && continued)) {
    const std::vector<int64_t> asked =
        token_ids(lora.tokens, model, tokenizer_of(planned.grown, planned.directory), added);
    if (continued && asked != adapter.tokens)
      throw tokens_error(fmt::format("the adapter of lora.init is continued as it is: these are not the {} "
                                     "tokens whose rows it has",
                                     adapter.tokens.size()),
                         lora.init, "leave lora.tokens out");
    adapter.tokens = asked;
  }
  const bool whole = std::ranges::find(adapter.also, model.names.embedding) != adapter.also.end();
  const bool pairs = adapter.kind == AdapterKind::kLora && adapter.adapts(kNoLayer, model.names.embedding);
  if (pairs && !adapter.tokens.empty())
    throw tokens_error("lora.targets has the embedding, and lora.tokens trains rows of it", "",
                       "leave lora.tokens out, or \"embed_tokens\" out of lora.targets");
  if (whole && !adapter.tokens.empty())
    throw tokens_error("lora.also trains the whole embedding, and these rows of it", "",
                       "leave lora.tokens out, or \"embed_tokens\" out of lora.also");
  if (!continued && !whole && !pairs) require_new_rows_trained(added, adapter);
}

// The same of a full run.
void require_new_rows_trained(const PlannedModel& planned) {
  const std::string embedding = planned.spec.names.embedding;
  if (!planned.grown || planned.adapter || planned.layout.blocks.front().trains("embed")) return;
  throw setting_error(
      "model.add_tokens: the rows of new tokens would stay as they begin, since train.only "
      "does not name the embedding",
      "",
      "add " + quote(embedding) + " to train.only" +
          (planned.spec.tied
               ? ""
               : ", and " + quote(planned.spec.names.head) + " where the model is to write the tokens"));
}

AdapterSpec make_adapter(const PlannedModel& planned, const Config& config) {
  const ModelSpec& model = planned.spec;
  const std::string& init = config.lora.init;
  AdapterSpec out = init.empty()
                        ? configured_adapter(model, config)
                        : continued_adapter(model, config, read_adapter_config(init, &model).spec, init);
  set_tokens(config, planned, out);
  return out;
}

// LoftQ needs the original weights: files with quantized weights do not tell the quantization error.
void require_elements(EncodingKind stored, const std::string& directory) {
  if (stored == EncodingKind::kPlain) return;
  throw setting_error(
      "lora.start = \"loftq\" needs the original weights, and these files have only "
      "quantized ones",
      directory, "set model.path to the unquantized model, or leave lora.start out");
}

// The reference chooses these frequencies for each batch, by its longest text; a run has one table.
void note_of_rope(const Config& config, const ModelSpec& spec) {
  for (const RopeSpec& rope : spec.ropes) {
    const bool longer = config.data.max_length > rope.original_max_position;
    const bool dynamic = rope.scaling == RopeSpec::Scaling::kDynamic && longer;
    if (!dynamic && rope.scaling != RopeSpec::Scaling::kLongRope) continue;
    log_note(
        "MODEL-24",
        fmt::format("data.max_length = {} chooses the model's RoPE: all texts of the run use the "
                    "frequencies for {} {} tokens",
                    config.data.max_length, longer ? "more than" : "at most", rope.original_max_position));
    return;
  }
}

// Removes suffixes of tuned models, which have the shape of their base.
std::string untuned(std::string name) {
  for (const std::string_view word :
       {"-Instruct", "-instruct", "-Base", "-base", "-Chat", "-chat", "-it", "-pt"}) {
    const size_t at = name.find(word), end = at + word.size();
    if (at != std::string::npos && (end == name.size() || name[end] == '-')) name.erase(at, word.size());
  }
  return name;
}

const ModelShape* find_shape(const std::string& name, std::span<const ModelShape> known) {
  auto shape = std::ranges::find(known, name, &ModelShape::name);  // "-Instruct-2507" has a shape of its own
  if (shape == known.end()) {
    shape = std::ranges::find(known, untuned(name), [](const ModelShape& s) { return untuned(s.name); });
  }
  return shape == known.end() ? nullptr : &*shape;
}

}  // namespace

void require_positions(const Config& config, const ModelSpec& spec) {
  const int64_t most = spec.embedding.positions, asked = config.data.max_length;
  if (most == 0 || asked <= most) return;
  throw setting_error(fmt::format("a text of {} tokens needs as many positions, and the model has learned "
                                  "an embedding for {}",
                                  asked, most),
                      config.model.path,
                      fmt::format("set data.max_length = {} or less (generate: a shorter prompt or a smaller "
                                  "--max-tokens; chat: a smaller --context)",
                                  most));
}

void warn_of_length(const Config& config, const ModelSpec& spec) {
  note_of_rope(config, spec);
  // Random weights have no trained context length.
  const int64_t most = spec.longest_text(), asked = config.data.max_length;
  if (config.model.init == ModelInit::kRandom || asked <= most) return;
  log_warning(
      "MODEL-24",
      fmt::format("data.max_length = {} is more than the {} positions that {} was trained for: it has "
                  "not learnt positions beyond them, and other programs may refuse such a text",
                  asked, most, config.model.path));
}

void note_dropouts(const PlannedModel& model) {
  if (model.directory.empty()) return;  // a built-in shape has no such keys
  const std::string path = model.directory + "/config.json";
  const NamedDropouts names = named_dropouts(read_small_file(path, kMostConfigBytes), path);
  if (names.applied.empty() && names.left_out.empty()) return;
  std::string text = "training ";
  if (!names.applied.empty()) text += fmt::format("applies {}", fmt::join(names.applied, ", "));
  if (!names.left_out.empty())
    text += fmt::format("{}leaves out {} (attention has no dropout here)",
                        names.applied.empty() ? "" : " and ", fmt::join(names.left_out, ", "));
  log_note("MODEL-24", fmt::format("{}, of {}", text, path));
}

void require_trainable(const Config& config, const PlannedModel& model) {
  if (!model.adapter) return;
  require_trainable(model.spec, *model.adapter, config.lora.init);
  if (!model.adapter->encoded) return;
  throw setting_error(
      "the adapter of lora.init is one of P-tuning, whose file has the embeddings that an encoder "
      "has computed, and not the encoder's weights, which would be trained",
      "",
      "use it as it is (lmlaunch generate, eval), continue the run that trained it, or set "
      "peft_type to \"PROMPT_TUNING\" in its "
      "adapter_config.json to train the embeddings themselves");
}

void stand_in(const Config& config, const Environment& environment, PlannedModel& model) {
  if (!model.grown) return;
  model.named_directory = model.directory;
  model.directory = grown_directory(*model.grown, config, model.named_directory, environment);
}

bool model_is_built_in(const std::string& path, std::span<const ModelShape> known) {
  return find_shape(path, known) != nullptr;
}

PlannedModel open_model(const Config& config, const Environment& environment,
                        std::span<const ModelShape> known) {
  PlannedModel out;
  const ModelShape* const shape = find_shape(config.model.path, known);
  if (shape != nullptr && !model_is_here(config.model.path, environment)) {
    out.spec = parse_model_spec(shape->config, shape->name);
  } else {
    out.directory = resolve_model(config.model.path, environment, config.lora.init);
    out.spec = read_model_spec(out.directory);
  }
  require_positions(config, out.spec);
  out.grown = grow_vocabulary(config, out.directory, out.spec);
  settle_scores(config, out.directory, out.spec);
  if (config.lora.start == LoraStart::kLoftq) require_elements(out.spec.stored, out.directory);
  if (trains_adapter(config)) out.adapter = make_adapter(out, config);
  out.layout = planned_layout(config, out.spec, out.adapter_spec(), {});
  require_new_rows_trained(out);
  set_groups(config.optimizer, out.layout, config.lora.b_lr_ratio);
  return out;
}

void share_experts(const PlanInputs& inputs, const World& world, int rank, PlannedModel& model) {
  refuse_parallel_experts(inputs, world);
  const ExpertShare share = expert_share(inputs.config, world, rank);
  if (share == model.layout.experts) return;
  model.layout = planned_layout(inputs.config, model.spec, model.adapter_spec(), share);
  set_groups(inputs.config.optimizer, model.layout, inputs.config.lora.b_lr_ratio);
}

}  // namespace lm
