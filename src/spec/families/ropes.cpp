#include "spec/families/ropes.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>

#include "spec/families/family.h"

namespace lm {
namespace {

using Scaling = RopeSpec::Scaling;

int64_t original_positions(const ConfigReader& table, const RopeDefaults& defaults) {
  // Read first, so that a wrong one is refused where another wins.
  const int64_t inside =
      table.size("original_max_position_embeddings", defaults.max_positions, kMostPositions);
  return defaults.original.value_or(inside);
}

void read_factor(const ConfigReader& table, const RopeDefaults&, RopeSpec& out) {
  table.required_number("factor");
  out.factor = table.positive("factor", 1);
}

void read_dynamic(const ConfigReader& table, const RopeDefaults& defaults, RopeSpec& out) {
  read_factor(table, defaults, out);
  out.original_max_position = defaults.max_positions;
  if (out.dim <= 2) table.fail("rope_type", "= \"dynamic\" needs heads of more than 2 features");
}

void read_llama3(const ConfigReader& table, const RopeDefaults& defaults, RopeSpec& out) {
  read_factor(table, defaults, out);
  out.low_freq_factor = table.required_number("low_freq_factor");
  out.high_freq_factor = table.required_number("high_freq_factor");
  out.original_max_position = original_positions(table, defaults);
  if (!(out.low_freq_factor >= 1e-6) || !(out.high_freq_factor > out.low_freq_factor) ||
      out.high_freq_factor > 1e6) {
    table.fail("high_freq_factor", "must be more than low_freq_factor, both in [1e-6, 1e6]");
  }
}

// 0 counts as missing, as the reference's `or` has it.
double nonzero(const ConfigReader& table, const char* key, double missing) {
  return table.number(key, 0) == 0 ? missing : table.positive(key, missing);
}

void read_yarn(const ConfigReader& table, const RopeDefaults& defaults, RopeSpec& out) {
  out.original_max_position = original_positions(table, defaults);
  // Only a factor that is written as null is the ratio of positions.
  if (!table.is_null("factor")) {
    read_factor(table, defaults, out);
  } else {
    out.factor = static_cast<double>(defaults.max_positions) / static_cast<double>(out.original_max_position);
  }
  const double mscale = nonzero(table, "mscale", 0), all = nonzero(table, "mscale_all_dim", 0);
  const auto scale = [&](double m) { return out.factor <= 1 ? 1.0 : 0.1 * m * std::log(out.factor) + 1.0; };
  const double by_factor = mscale != 0 && all != 0 ? scale(mscale) / scale(all) : scale(1);
  out.attention_factor = table.positive("attention_factor", by_factor);
  out.beta_fast = nonzero(table, "beta_fast", 32);
  out.beta_slow = nonzero(table, "beta_slow", 1);
  out.truncate = table.boolean("truncate", true);
  if (defaults.of_a_kind && !out.truncate)
    table.fail("truncate", "= false is not supported for one kind of layer: the reference ignores it there");
  if (out.theta == 1) table.fail("rope_theta", "= 1 leaves yarn no frequencies to choose from");
}

std::vector<double> read_factors(const ConfigReader& table, const char* key, const RopeSpec& rope) {
  const Json* const list = table.find(key);
  if (list == nullptr) table.fail(key, "is missing");
  if (!list->is_array() || std::ssize(*list) != rope.dim / 2)
    table.fail(key,
               fmt::format("must be a list with one number for each of the {} frequencies", rope.dim / 2));
  std::vector<double> out;
  for (const Json& one : *list) {
    if (!one.is_number() || !(one.get<double>() >= 1e-6) || one.get<double>() > 1e6)
      table.fail(key, fmt::format("entry {} must be a number in [1e-6, 1e6]", out.size()));
    out.push_back(one.get<double>());
  }
  return out;
}

void read_longrope(const ConfigReader& table, const RopeDefaults& defaults, RopeSpec& out) {
  out.original_max_position = original_positions(table, defaults);
  out.short_factors = read_factors(table, "short_factor", out);
  out.long_factors = read_factors(table, "long_factor", out);
  const auto original = static_cast<double>(out.original_max_position);
  const double ratio = static_cast<double>(defaults.max_positions) / original;
  out.factor = table.find("factor") ? table.positive("factor", 1) : ratio;
  // ln(1) = 0 divides nothing.
  if (out.original_max_position == 1 && out.factor > 1)
    table.fail("original_max_position_embeddings", "= 1 is not supported");
  const double by_factor = out.factor <= 1 ? 1 : std::sqrt(1 + std::log(out.factor) / std::log(original));
  out.attention_factor = table.positive("attention_factor", by_factor);
}

void read_proportional(const ConfigReader& table, const RopeDefaults& defaults, RopeSpec& out) {
  out.factor = table.positive("factor", 1);
  const double part = table.number("partial_rotary_factor", defaults.rotated == 0 ? 1 : defaults.rotated);
  if (!(part >= 0) || part > 1) table.fail("partial_rotary_factor", "must be in [0, 1]");
  out.turned = static_cast<int64_t>(std::floor(part * static_cast<double>(out.dim) / 2));
}

struct Kind {
  const char* word = "";
  Scaling scaling = Scaling::kNone;
  void (*read)(const ConfigReader&, const RopeDefaults&, RopeSpec&) = nullptr;
};
constexpr Kind kKinds[] = {{"default", Scaling::kNone, [](const auto&, const auto&, auto&) {}},
                           {"linear", Scaling::kLinear, read_factor},
                           {"dynamic", Scaling::kDynamic, read_dynamic},
                           {"llama3", Scaling::kLlama3, read_llama3},
                           {"yarn", Scaling::kYarn, read_yarn},
                           {"longrope", Scaling::kLongRope, read_longrope},
                           {"proportional", Scaling::kProportional, read_proportional}};

const Kind& kind_of(const ConfigReader& table, const RopeDefaults& defaults) {
  const char* const key = table.find("rope_type") ? "rope_type" : "type";
  const std::string written = table.text(key).value_or("default");
  const bool old = defaults.old_longrope && (written == "su" || written == "yarn");
  const std::string type = old ? "longrope" : written;
  std::string supported;
  for (const Kind& kind : kKinds) {
    if (defaults.old_longrope && kind.scaling != Scaling::kNone && kind.scaling != Scaling::kLongRope)
      continue;
    if (type == kind.word) return kind;
    supported += (supported.empty() ? "" : ", ") + std::string(kind.word);
  }
  table.fail(key, "= \"" + written.substr(0, 100) + "\" is not supported (supported: " + supported + ")");
}

// The features of a head that are turned: all of them, unless the family knows partial_rotary_factor.
int64_t rotated_features(const ConfigReader& table, const RopeDefaults& defaults) {
  const double part = table.number("partial_rotary_factor", defaults.rotated == 0 ? 1 : defaults.rotated);
  if (defaults.rotated == 0 && part != 1)
    table.fail("partial_rotary_factor", "other than 1 is not supported");
  if (!(part > 0) || part > 1) table.fail("partial_rotary_factor", "must be in (0, 1]");
  const auto dim = static_cast<int64_t>(static_cast<double>(defaults.head_dim) * part);
  if (dim == 0 || dim % 2 != 0) {
    table.fail("partial_rotary_factor",
               fmt::format("= {} of {} features leaves {}: RoPE turns pairs", part, defaults.head_dim, dim));
  }
  return dim;
}

const Json& nothing() {
  static const Json none = Json::object();
  return none;
}

RopeDefaults defaults_of(const ConfigReader& config, const Family& family, const ModelSpec& spec) {
  RopeDefaults out{.theta = config.number("rope_theta", family.rope_theta),
                   .rotated = family.rotated,
                   .head_dim = spec.layers.front().attention().head_dim,
                   .max_positions = spec.max_positions,
                   .neighbours = family.neighbours,
                   .old_longrope = family.old_longrope};
  constexpr const char* kOriginal = "original_max_position_embeddings";
  if (config.find(kOriginal) || family.original_positions > 0)
    out.original = config.size(kOriginal, family.original_positions, kMostPositions);
  // Beside the table it means the same as in it.
  constexpr const char* kPart = "partial_rotary_factor";
  const double part = config.number(kPart, family.rotated == 0 ? 1 : family.rotated);
  if (family.rotated == 0 && part != 1) config.fail(kPart, "other than 1 is not supported");
  if (!(part > 0) || part > 1) config.fail(kPart, "must be in (0, 1]");
  if (family.rotated != 0) out.rotated = part;
  return out;
}

// The layers with a window, or those without one.
std::vector<AttentionSpec*> layers_of(ModelSpec& spec, bool sliding) {
  std::vector<AttentionSpec*> out;
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& attention = layer.attention();
    if ((attention.window > 0) == sliding) out.push_back(&attention);
  }
  return out;
}

// A table for those layers.
void add_table(const ConfigReader& table, double theta, const std::vector<AttentionSpec*>& layers,
               ModelSpec& spec) {
  spec.ropes.push_back(read_rope_table(table, {.theta = theta,
                                               .head_dim = layers.front()->head_dim,
                                               .max_positions = spec.max_positions,
                                               .of_a_kind = true}));
  for (AttentionSpec* const attention : layers) {
    if (attention->head_dim != layers.front()->head_dim)
      table.fail("rope_type", "serves layers whose head_dim differs, which is not supported");
    attention->rope = static_cast<int>(spec.ropes.size()) - 1;
  }
}

constexpr const char* kParameters = "rope_parameters";
constexpr const char* kKindNames[] = {"full_attention", "sliding_attention"};

}  // namespace

RopeSpec read_rope_table(const ConfigReader& table, const RopeDefaults& defaults) {
  const Kind& kind = kind_of(table, defaults);
  RopeSpec out{.neighbours = defaults.neighbours, .scaling = kind.scaling};
  out.theta = table.number("rope_theta", defaults.theta);
  if (!(out.theta >= 1) || out.theta > 1e15) table.fail("rope_theta", "must be in [1, 1e15]");
  out.dim = kind.scaling == Scaling::kProportional ? defaults.head_dim : rotated_features(table, defaults);
  kind.read(table, defaults, out);
  return out;
}

void read_rope_or(const ConfigReader& config, const Family& family, const Json& missing, ModelSpec& spec) {
  constexpr const char* kScaling = "rope_scaling";
  const RopeDefaults defaults = defaults_of(config, family, spec);
  const Json* const scaling = config.find(kScaling);
  const Json* const parameters = config.find(kParameters);
  const bool old = scaling && scaling->is_object() && !scaling->empty();
  const char* const key = old ? kScaling : kParameters;
  const ConfigReader table = config.inside(key, old ? *scaling : parameters ? *parameters : missing);
  for (const char* nested : kKindNames) {
    if (table.find(nested)) config.fail(key, "per kind of layer is not supported");
  }
  // Named without a table, where there is none.
  if (!(defaults.theta >= 1) || defaults.theta > 1e15) config.fail("rope_theta", "must be in [1, 1e15]");
  spec.ropes = {read_rope_table(table, defaults)};
}

void read_rope(const ConfigReader& config, const Family& family, ModelSpec& spec) {
  read_rope_or(config, family, nothing(), spec);
}

void read_ropes_by_kind(const ConfigReader& config, const KindDefaults& defaults, ModelSpec& spec) {
  const ConfigReader entries =
      config.inside(kParameters, config.find(kParameters) ? *config.find(kParameters) : nothing());
  const Json *full = entries.find(kKindNames[0]), *sliding = entries.find(kKindNames[1]);
  // The reference would ignore them.
  if (config.find(kParameters) && !full && !sliding)
    config.fail(kParameters, "must have an entry for each kind of layer: full_attention, sliding_attention");
  spec.ropes.clear();
  if (const auto layers = layers_of(spec, false); !layers.empty()) {
    const double theta = config.number("rope_theta", defaults.full_theta);
    const Json* const scaling = config.find("rope_scaling");
    Json merged = full ? *full : nothing();
    if (scaling) {
      config.inside("rope_scaling", *scaling);
      if (merged.is_object()) merged.update(*scaling);
    }
    add_table(
        full || !scaling ? entries.inside(kKindNames[0], merged) : config.inside("rope_scaling", merged),
        theta, layers, spec);
  }
  if (const auto layers = layers_of(spec, true); !layers.empty()) {
    const char* const key = defaults.sliding_key;
    const double theta = key ? config.number(key, defaults.sliding_theta) : defaults.sliding_theta;
    add_table(entries.inside(kKindNames[1], sliding ? *sliding : nothing()), theta, layers, spec);
  }
}

void read_rope_entries(const ConfigReader& config, const Json& missing, ModelSpec& spec) {
  if (config.find("rope_scaling")) config.fail("rope_scaling", "is not supported: rope_parameters is");
  const Json* const written = config.find(kParameters);
  const ConfigReader entries = config.inside(kParameters, written ? *written : missing);
  spec.ropes.clear();
  for (const bool slides : {false, true}) {
    const auto layers = layers_of(spec, slides);
    if (layers.empty()) continue;
    const ConfigReader table = entries.inside(kKindNames[slides ? 1 : 0]);
    add_table(table, table.required_number("rope_theta"), layers, spec);
  }
}

}  // namespace lm
