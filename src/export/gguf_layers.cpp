#include "export/gguf_layers.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>

namespace lm {
namespace {

using Has = LlamaCpp::Has;

bool near(double a, double b) {
  return std::abs(a - b) <= 1e-6 * std::abs(b);
}

class Check {
 public:
  Check(const ModelSpec& spec, const LlamaCpp& arch) : spec_(spec), arch_(arch), layers_(spec) {}

  void run() {
    norm(spec_.final_norm);
    for (int64_t i = 0; i < spec_.layer_count(); ++i) {
      shape(spec_.layer(i));
      attention(spec_.layer(i).attention());
      turns(i, spec_.layer(i).attention());
    }
    normed_heads();
    borrowed();
    inputs();
    windows();
    ropes();
    ends();
  }

 private:
  // Refuses a model if `bad`.
  void refuse(bool bad, const std::string& what) const {
    if (bad) refuse_gguf(what + " in the architecture \"" + arch_.name + "\"", spec_);
  }
  void has(bool present, Has has, const std::string& what) const {
    refuse(present && has == Has::kNever, what);
    refuse(!present && has == Has::kMust, "a model without " + what);
  }

  void norm(const NormSpec& norm) const {
    refuse(norm.centred() != arch_.layer_norm || norm.has_bias() != arch_.norm_bias || !norm.has_weight(),
           "norms of this kind");
    refuse(norm.eps != spec_.final_norm.eps, "norms of several epsilons");
  }

  // Two sublayers, with their norms where the architecture has them, experts beside the second, and the
  // layer's own input.
  void shape(const LayerSpec& layer) const {
    constexpr const char* kWhat = "layers of this shape";
    const bool fed = spec_.embedding.inputs.width > 0;
    const bool mixed = arch_.gemma4 && layer.find<ExpertsSpec>() != nullptr;
    refuse(fed && !arch_.gemma4, "inputs of each layer");
    refuse(layer.attention().borrows() && !arch_.gemma4, "layers that read the keys and values of others");
    refuse(layer.sublayers.size() != size_t{2} + mixed + fed || layer.scalar > arch_.gemma4, kWhat);
    if (mixed) experts_beside(layer.sublayers[1], layer.sublayers[2]);
    if (fed) layer_input(layer.sublayers.back());
    const SublayerSpec &attention = layer.sublayers[0], &mlp = layer.sublayers[1];
    const bool shared = arch_.norms == LlamaCpp::Norms::kShared;
    const bool before = arch_.norms != LlamaCpp::Norms::kAfter;
    const bool after = arch_.norms == LlamaCpp::Norms::kAround || arch_.norms == LlamaCpp::Norms::kAfter;
    refuse(!std::holds_alternative<AttentionSpec>(attention.mixer) || attention.beside ||
               mlp.beside != shared || attention.norm.has_value() != before ||
               mlp.norm.has_value() != (before && !shared),
           kWhat);
    for (const SublayerSpec& sublayer : layer.sublayers) {
      refuse(sublayer.norm_after.has_value() != after, kWhat);
      refuse(sublayer.residual_scale != 1 && !arch_.residual_scale, "factors of the residual stream");
      refuse(sublayer.residual_scale != spec_.layer(0).sublayers[0].residual_scale,
             "several factors of the residual stream");
      if (sublayer.norm) norm(*sublayer.norm);
      if (sublayer.norm_after) norm(*sublayer.norm_after);
      refuse(sublayer.norm_joined.has_value() && !mixed, kWhat);
    }
    if (const auto* const experts = std::get_if<ExpertsSpec>(&mlp.mixer)) {
      refuse(!arch_.experts, kWhat);
      mixture(*experts);
    } else if (const auto* const gated = std::get_if<GatedMlpSpec>(&mlp.mixer)) {
      refuse(arch_.experts, "layers without experts");
      refuse(!arch_.gated, kWhat);
      linear(gated->activation, gated->bias);
    } else if (const auto* const plain = std::get_if<PlainMlpSpec>(&mlp.mixer)) {
      refuse(arch_.gated, kWhat);
      linear(plain->activation, plain->bias);
    } else {
      refuse(true, kWhat);
    }
    refuse(feed_forward(layer) != feed_forward(spec_.layer(0)) && !arch_.gemma4, "MLPs of several sizes");
  }
  void experts_beside(const SublayerSpec& mlp, const SublayerSpec& beside) const {
    const auto* const experts = std::get_if<ExpertsSpec>(&beside.mixer);
    refuse(experts == nullptr || !beside.beside || !mlp.norm_joined || !experts->reads_stream() ||
               !experts->factors || experts->activation != arch_.activation || !experts->renormalise ||
               experts->scores != RouterScores::kSoftmax,
           "experts of this shape");
    refuse(spec_.layer(0).find<ExpertsSpec>() == nullptr, "layers without experts");
    norm(*mlp.norm_joined);
    norm(*experts->input_norm);
    refuse(experts->router_norm->eps != spec_.final_norm.eps, "norms of several epsilons");
  }
  void mixture(const ExpertsSpec& experts) const {
    refuse(experts.activation != arch_.activation, "this activation function");
    refuse(experts.scores != RouterScores::kSoftmax, "sigmoid scores of experts");
    refuse(experts.renormalise && !arch_.renormalised, "experts' weights that add up to 1");
    refuse(!experts.renormalise && arch_.renormalised, "experts' weights that do not add up to 1");
  }
  void layer_input(const SublayerSpec& sublayer) const {
    const auto* const input = std::get_if<LayerInputSpec>(&sublayer.mixer);
    refuse(input == nullptr || input->width != spec_.embedding.inputs.width ||
               input->activation != arch_.activation || sublayer.norm || sublayer.beside,
           "inputs of layers of this shape");
  }
  void linear(Activation activation, bool bias) const {
    refuse(activation != arch_.activation, "this activation function");
    has(bias, arch_.mlp_bias, "biases of the MLP");
  }

  void attention(const AttentionSpec& attention) const {
    const AttentionSpec& first = layers_.attention();
    // Those of a layer with a window may differ in Gemma 4.
    const AttentionSpec& alike = arch_.gemma4 && attention.window > 0 ? *layers_.sliding : first;
    refuse(attention.heads != first.heads || attention.head_dim != alike.head_dim ||
               (attention.kv_heads != first.kv_heads && !arch_.gemma4),
           "layers with heads of several sizes");
    refuse(arch_.heads_of_hidden && attention.q_rows() != spec_.hidden,
           "heads whose size is not hidden_size / heads");
    refuse(arch_.heads_alike && attention.kv_heads != attention.heads, "heads that share their keys");
    has(attention.qkv_bias, arch_.qkv_bias, "biases of q, k and v");
    has(attention.out_bias, arch_.out_bias, "biases of o_proj");
    has(attention.head_norm.has_value(), arch_.head_norm, "norms of q and k");
    if (attention.head_norm) {
      norm(*attention.head_norm);
      refuse(attention.joint_norm != arch_.joint_norm || attention.own_norms != arch_.own_norms,
             "norms of q and k of this width");
    }
    refuse(attention.head_norm.has_value() != first.head_norm.has_value(),
           "norms of q and k in some layers alone");
    // What is borrowed has been normed.
    refuse((attention.value_norm.has_value() != arch_.gemma4 && !attention.borrows()) ||
               attention.values_are_keys > arch_.gemma4,
           "values like these");
    refuse(!near(attention.scale(), scale(attention)), "this scale of the softmax");
    has(attention.softcap > 0, arch_.score_cap, "soft caps of scores");
    refuse(attention.softcap != first.softcap, "several soft caps of scores");
    const bool grows = attention.position_slope > 0;
    refuse(grows && !arch_.position_scale, "queries that grow with their position");
    refuse(grows && (layers_.rope() == nullptr ||
                     attention.position_period != layers_.rope()->original_max_position),
           "queries that grow with their position in this way");
    refuse(attention.position_slope != first.position_slope, "queries that grow in some layers alone");
  }
  double scale(const AttentionSpec& attention) const {
    const double plain = 1 / std::sqrt(static_cast<double>(attention.head_dim));
    switch (arch_.scale) {
      case LlamaCpp::Scale::kPlain:
        return plain;
      case LlamaCpp::Scale::kGemma:
        return spec_.layer_count() == arch_.largest_layers
                   ? 1 / std::sqrt(static_cast<double>(spec_.hidden / attention.heads))
                   : plain;
      case LlamaCpp::Scale::kOne:
        return 1;
      case LlamaCpp::Scale::kGiven:
        return layers_.attention().scale();
    }
    return plain;
  }

  // It asks for these norms by the number of layers, which tells Command R+ from Command R.
  void normed_heads() const {
    const int64_t least = arch_.normed_layers;
    if (least == 0) return;
    const bool normed = layers_.attention().head_norm.has_value(), asked = spec_.layer_count() >= least;
    refuse(normed && !asked, fmt::format("norms of q and k in fewer than {} layers", least));
    refuse(asked && !normed, fmt::format("{} layers or more without norms of q and k", least));
  }

  // The file says how many of the last layers borrow keys and values. They read those of one of the last two
  // layers that have their own: of the last one if they have no window, else of the one before.
  void borrowed() const {
    const int64_t layers = spec_.layer_count(), own = layers - borrowers(spec_);
    refuse(arch_.gemma4 && own < 2, "fewer than two layers with keys and values of their own");
    for (int64_t i = 0; i < layers; ++i) {
      const AttentionSpec& attention = spec_.layer(i).attention();
      const int64_t source = i < own ? -1 : own - (attention.window > 0 ? 2 : 1);
      refuse(attention.source != source, "keys and values that are borrowed from these layers");
    }
  }

  void inputs() const {
    const InputsSpec& inputs = spec_.embedding.inputs;
    if (inputs.width == 0) return;
    norm(inputs.norm);
    refuse(inputs.vocab != spec_.vocab, "a table of layers' inputs with other rows than the embedding's");
  }

  void turns(int64_t layer, const AttentionSpec& attention) const {
    bool turned = true;
    switch (arch_.turns) {
      case LlamaCpp::Turns::kAll:
        break;
      case LlamaCpp::Turns::kNone:
        turned = false;
        break;
      case LlamaCpp::Turns::kAllOrNone:
        turned = layers_.attention().rotates();
        break;
      case LlamaCpp::Turns::kButEach:
        turned = (layer + 1) % arch_.unturned_each != 0;
        break;
      case LlamaCpp::Turns::kSliding:
        turned = layers_.sliding == nullptr || attention.window > 0;
        break;
    }
    refuse(attention.rotates() && !turned, "RoPE in this layer");
    refuse(!attention.rotates() && turned, "layers without RoPE other than its built-in ones");
    if (!attention.rotates()) return;
    const RopeSpec& table = spec_.ropes[static_cast<size_t>(attention.rope)];
    refuse(!(table == (attention.window > 0 ? *layers_.sliding_rope : *layers_.full_rope)),
           "several RoPE tables");
    refuse(table.dim != attention.head_dim && !arch_.partial, "RoPE of a part of a head");
    refuse(table.neighbours && !arch_.neighbours, "RoPE of neighbouring features");
    // Rows of q and k are put into another order, as which their norms' weights would have to be, too.
    refuse(table.neighbours != arch_.neighbours && attention.head_norm.has_value(),
           "norms of q and k with this RoPE");
  }

  void windows() const {
    const bool slides = layers_.sliding != nullptr;
    for (const LayerSpec& layer : spec_.layers) {
      const int64_t window = layer.attention().window;
      refuse(arch_.windows != LlamaCpp::Windows::kNone && window > 0 && window != layers_.sliding->window,
             "windows of several sizes");
    }
    refuse(!slides && arch_.always_slides, "a model without windows");
    if (arch_.window_layers > 0)
      refuse(slides != (spec_.layer_count() == arch_.window_layers),
             fmt::format("windows but in {} layers", arch_.window_layers));
    refuse(arch_.windows == LlamaCpp::Windows::kEach && slides && !full_each(spec_, arch_),
           "windows in these layers");
  }

  void ropes() const {
    const RopeSpec *full = layers_.full_rope, *sliding = layers_.sliding_rope;
    if (full != nullptr && sliding != nullptr && !(*full == *sliding)) {
      refuse(!arch_.plain_in_windows, "several RoPE tables");
      refuse(sliding->scaling != RopeSpec::Scaling::kNone, "scaled RoPE in layers with a window");
      refuse(!arch_.own_base_in_windows && full->theta != sliding->theta, "RoPE of several bases");
    }
    if (layers_.rope() != nullptr) scaling(*layers_.rope());
  }
  void scaling(const RopeSpec& rope) const {
    switch (rope.scaling) {
      case RopeSpec::Scaling::kNone:
      case RopeSpec::Scaling::kLinear:
        return;
      case RopeSpec::Scaling::kLlama3:
        return refuse(!arch_.rope_factors, "Llama 3's RoPE scaling");
      case RopeSpec::Scaling::kDynamic:
        return refuse(true, "dynamic RoPE scaling");
      case RopeSpec::Scaling::kYarn:
        refuse(!rope.truncate, "yarn with frequencies that are not whole");
        refuse(!(rope.factor > 1), "yarn with a factor that is not more than 1");
        // Older versions read these for one architecture alone.
        return refuse((rope.beta_fast != 32 || rope.beta_slow != 1) && !arch_.position_scale,
                      "yarn with other betas than 32 and 1");
      case RopeSpec::Scaling::kLongRope:
        return refuse(!arch_.longrope, "longrope");
      case RopeSpec::Scaling::kProportional:
        return refuse(!arch_.gemma4, "proportional RoPE");
    }
  }

  // Embedding and head.
  void ends() const {
    refuse(arch_.tied_only && !spec_.tied, "a head of its own");
    refuse((spec_.embedding.positions > 0) != arch_.learned_positions, "learned positions");
    const double factor = spec_.embedding.scale, root = std::sqrt(static_cast<double>(spec_.hidden));
    refuse(arch_.embedding == LlamaCpp::Embedding::kPlain && factor != 1, "a factor of the embedding");
    refuse(arch_.embedding == LlamaCpp::Embedding::kRoot && !near(factor, root),
           "this factor of the embedding");
    refuse(arch_.logits == LlamaCpp::Logits::kPlain && spec_.head.logit_scale != 1, "a factor of logits");
    has(spec_.head.logit_cap > 0, arch_.logit_cap, "a soft cap of logits");
  }

  const ModelSpec& spec_;
  const LlamaCpp& arch_;
  GgufLayers layers_;
};

bool follows(const ModelSpec& spec, int64_t n) {
  for (int64_t i = 0; i < spec.layer_count(); ++i) {
    const bool slides = n == 0 || i % n < n - 1;
    if (slides != (spec.layer(i).attention().window > 0)) return false;
  }
  return true;
}

}  // namespace

GgufLayers::GgufLayers(const ModelSpec& spec) {
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec& attention = layer.attention();
    const AttentionSpec*& first = attention.window > 0 ? sliding : full;
    const RopeSpec*& rope = attention.window > 0 ? sliding_rope : full_rope;
    if (first == nullptr) first = &attention;
    if (rope == nullptr && attention.rotates()) rope = &spec.ropes[static_cast<size_t>(attention.rope)];
  }
}

int64_t borrowers(const ModelSpec& spec) {
  return std::ranges::count_if(spec.layers, [](const LayerSpec& one) { return one.attention().borrows(); });
}

int64_t feed_forward(const LayerSpec& layer) {
  if (const auto* const gated = layer.find<GatedMlpSpec>()) return gated->ffn;
  if (const auto* const experts = layer.find<ExpertsSpec>()) return experts->ffn;
  return layer.find<PlainMlpSpec>()->ffn;
}

std::optional<int64_t> full_each(const ModelSpec& spec, const LlamaCpp& arch) {
  if (arch.full_each > 0 && follows(spec, arch.full_each)) return arch.full_each;
  for (int64_t n = 0; n <= spec.layer_count(); ++n) {
    if (follows(spec, n)) return n;
  }
  return std::nullopt;
}

void check_layers(const ModelSpec& spec, const LlamaCpp& arch) {
  Check(spec, arch).run();
}

}  // namespace lm
