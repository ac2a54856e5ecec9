#include "gpu_training.h"

#include <cstring>
#include <filesystem>
#include <functional>
#include <random>

#include "base/error.h"
#include "base/host_device.h"
#include "kernels/runtime.h"
#include "tests/support/family_shapes.h"
#include "tests/support/llama_spec.h"
#include "train/rank.h"
#include "weights/load_store.h"

namespace lm {
namespace {

constexpr int kPadToken = 3;

// About a third of the targets is left out, as in prompts; tokens repeat, and one of them is the pad token.
StepBatches batches_of(const Training& training, int64_t step) {
  StepBatches out;
  int32_t sample = static_cast<int32_t>(step * 100);
  std::mt19937 engine(static_cast<uint32_t>(step));
  for (const std::vector<int64_t>& lengths : training.documents) {
    Batch batch;
    batch.document_start.push_back(0);
    for (const int64_t length : lengths) {
      const auto begin = batch.token.size();
      for (int64_t p = 0; p < length; ++p) {
        const auto vocab = static_cast<uint32_t>(training.spec.vocab);
        const uint32_t drawn = engine() % 3 == 0 ? engine() % 11 : engine() % vocab;
        batch.token.push_back(static_cast<int32_t>(drawn));
        batch.position.push_back(static_cast<int32_t>(p));
        batch.sample.push_back(sample);
      }
      for (int64_t p = 0; p < length; ++p) {
        const bool learnt = p + 1 < length && engine() % 3 != 0;
        batch.target.push_back(learnt ? batch.token[begin + static_cast<size_t>(p) + 1] : -1);
        out.target_tokens += learnt ? 1 : 0;
        if (!training.weighted) continue;
        // Some are 0.
        batch.weight.push_back(static_cast<float>(engine() % 9) * 0.25F);
        out.target_weight = out.target_weight.value_or(0) + (learnt ? batch.weight.back() : 0);
      }
      batch.document_start.push_back(static_cast<int32_t>(batch.token.size()));
      ++sample;
    }
    out.micro.push_back(std::move(batch));
  }
  return out;
}

std::vector<float> to_floats(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> out(bytes.size() / dtype_size(dtype));
  for (size_t i = 0; i < out.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&out[i], bytes.data() + i * 4, 4);
    } else {
      uint16_t half = 0;
      std::memcpy(&half, bytes.data() + i * 2, 2);
      out[i] = dtype == DType::kF16 ? to_float(Fp16{half}) : to_float(Bf16{half});
    }
  }
  return out;
}

std::vector<std::byte> to_bytes(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> out(values.size() * dtype_size(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = dtype == DType::kF16 ? to_fp16(values[i]).bits : to_bf16(values[i]).bits;
    if (dtype == DType::kF32) {
      std::memcpy(out.data() + i * 4, &values[i], 4);
    } else {
      std::memcpy(out.data() + i * 2, &half, 2);
    }
  }
  return out;
}

// Norms and buffers around 1, everything else around 0: unlike fresh weights, these leave no parameter
// special.
std::vector<float> drawn_values(const Parameter& parameter) {
  std::mt19937 engine(static_cast<uint32_t>(std::hash<std::string>()(parameter.name)));
  const bool norm = parameter.kind == ParameterKind::kNorm || parameter.kind == ParameterKind::kBuffer;
  const bool wide = parameter.kind == ParameterKind::kEmbedding || parameter.kind == ParameterKind::kBias;
  std::normal_distribution<float> normal(norm ? 1.f : 0.f, norm ? 0.2f : wide ? 0.5f : 0.1f);
  std::vector<float> out(static_cast<size_t>(parameter.elements()));
  for (float& value : out) value = normal(engine);
  return out;
}

// What a unit has of a tensor: rows of the head's matrix, or all of it.
struct Piece {
  const TensorPlace* place;
  int64_t first, elements;
};

std::vector<Piece> pieces(const ModelLayout& layout, const Unit& unit) {
  std::vector<Piece> out;
  for (const TensorPlace& place : layout.blocks[static_cast<size_t>(unit.block)].tensors) {
    const Parameter& p = place.parameter;
    const bool cut = unit.segment() && (p.name == "head");
    if (cut) {
      out.push_back({&place, unit.first_row * p.columns, unit.rows * p.columns});
    } else if (unit.holds(place)) {
      out.push_back({&place, 0, p.elements()});
    }
  }
  return out;
}

class Trainee {
 public:
  Trainee(const Training& training, StreamView stream)
      : t_(training),
        layout_(make_layout(t_.spec, adapter(), t_.dtype)),
        stream_(stream),
        units_(layout_.units(false)) {
    optimizer_.weight_decay = 0.01;
    // Gradients are some 1e-3: where they are all but 0, Adam must not make a step of their rounding's sign.
    optimizer_.rule.of<AdamW>().eps = 1e-5;
    optimizer_.clip = t_.clip;
    optimizer_.master = t_.master;
    const Config config = make_config();
    Machine machine;
    machine.cores = 2;
    if (on_device()) machine.gpus.push_back(built_in_gpu("H200"));
    plan_ = make_plan(
        {config, t_.spec, adapter(), layout_, stream.device, {.weighted = t_.weighted}, t_.update_on_host},
        machine);
    if (t_.row_chunk > 0) plan_.step.arithmetic.row_chunk = t_.row_chunk;
    units_ = layout_.units(plan_.placement.head_segments() > 0);
    rank_ = std::make_unique<Rank>(
        RankSetup{.spec = t_.spec,
                  .layout = layout_,
                  .adapter = adapter(),
                  .optimizer = optimizer_,
                  .plan = plan_,
                  .seed = 7,
                  .max_length = kMaxLength,
                  .tokens_per_step = kMaxLength * std::ssize(t_.documents),
                  .max_grad_norm = 0.5,
                  .router_aux_loss = t_.router_aux_loss,
                  .swap_paths = {{std::filesystem::temp_directory_path().string(), 1}}},
        stream_);
  }

  int64_t planned_on_device() const {
    int64_t bytes = 0;
    for (const ClassBytes& row : plan_.classes)
      bytes +=
          row.tier_id == TierId::kDevice && row.name != "context" && row.name != "LibTorch" ? row.bytes : 0;
    return bytes;
  }

  Outcome train() {
    Outcome out;
    const LoadSetup load{t_.spec, layout_, t_.dtype, stream_, 1};
    initialise_weights(load, 1, rank_->weights());
    if (t_.lora) initialise_adapter(load, 1, rank_->weights());
    out.initialised = weights(true);
    draw_weights();
    rank_->weights_ready();
    const Tensors before = weights(false);

    const StepBatches first = batches_of(t_, 1);
    std::vector<int32_t> rows;
    for (int32_t row = 0; row < first.micro[0].tokens(); ++row) rows.push_back(row);
    out.logits = rank_->step().logits(first.micro[0], rows);
    out.continued = continued(first.micro[0]);
    for (int64_t step = 1; step <= kSteps; ++step) {
      const StepResult result =
          rank_->step().run(batches_of(t_, step), step, 3e-3, t_.dtype == DType::kF16 ? 1024 : 1);
      out.losses.push_back(result.loss);
      out.norms.push_back(result.grad_norm);
      for (const auto& [name, value] : result.columns) out.figures.push_back(value);
      if (step == 1) out.gradients = gradients();
    }
    rank_->step().flush();
    out.change = weights(false);
    for (auto& [name, values] : out.change) {
      const std::vector<float>& was = before.at(name);
      for (size_t i = 0; i < values.size(); ++i) values[i] -= was[i];
    }
    out.evaluated = rank_->step().evaluate(first.micro[0]).nll;
    out.arena_bytes = rank_->arena().high_water();
    out.arena_planned = plan_.arena.bytes;
    out.head_segments = plan_.placement.head_segments();
    return out;
  }

 private:
  // A token, five at once, token by token, and from an earlier place once more.
  std::vector<std::pair<int64_t, std::vector<float>>> continued(const Batch& batch) {
    Decoder decoder(rank_->context(), {.positions = kMaxLength});
    const int64_t length = batch.document_start[1];
    std::vector<int64_t> ends = {1};
    for (int64_t end = std::min<int64_t>(6, length); end <= length; ++end) ends.push_back(end);
    ends.push_back(std::min<int64_t>(3, length));
    std::vector<std::pair<int64_t, std::vector<float>>> out;
    for (const int64_t end : ends) {
      const auto logits =
          decoder.logits(rank_->step(), std::span(batch.token).first(static_cast<size_t>(end)));
      out.emplace_back(end, std::vector<float>(logits.begin(), logits.end()));
    }
    return out;
  }
  bool on_device() const { return stream_.device == DeviceType::kCuda; }
  const AdapterSpec* adapter() {
    if (!t_.lora) return nullptr;
    adapter_.dropout = t_.dropout;
    // "down_proj" alone would name experts' matrices, too.
    adapter_.targets = {"q_proj",
                        "k_proj",
                        "v_proj",
                        "o_proj",
                        "gate_proj",
                        "up_proj",
                        "mlp.down_proj",
                        "shared_expert.down_proj",
                        "shared_experts.down_proj"};
    if (t_.adapted_experts) {
      adapter_.targets.insert(adapter_.targets.end(), {"experts.gate_up_proj", "experts.down_proj"});
      adapter_.ranks = {{"experts.down_proj", 8}};  // rows of bf16 in whole packs
      adapter_.alphas = {{"experts.down_proj", 12}};
    }
    return &adapter_;
  }

  DType type_of(const TensorPlace& place) const {
    return t_.fp32_adapters && !place.frozen ? DType::kF32 : t_.dtype;
  }

  Config make_config() const {
    Config config;
    config.data.max_length = kMaxLength;
    config.data.packing = true;
    config.train.micro_batch = 1;
    config.train.global_batch = std::ssize(t_.documents);
    config.train.recompute = t_.recompute ? Recompute::kBlock : Recompute::kNone;
    config.train.router_aux_loss = t_.router_aux_loss;
    config.train.method = t_.lora ? Method::kLora : Method::kFull;
    config.train.gradients = t_.gradients == DType::kF32 ? GradientDType::kF32 : GradientDType::kBF16;
    config.model.dtype = model_type(t_.dtype);
    if (t_.fp32_adapters) config.lora.dtype = LoraDType::kF32;
    config.optimizer = optimizer_;
    config.optimizer.threads = 2;
    const auto tier_id = [&](OffloadTier wanted) { return on_device() ? wanted : OffloadTier::kNone; };
    config.offload.optimizer = tier_id(t_.optimizer);
    config.offload.gradients = tier_id(t_.gradients_tier);
    config.offload.weights = tier_id(t_.weights);
    config.offload.activations = tier_id(t_.activations);
    return config;
  }

  std::vector<float> fetch(const std::byte* memory, int64_t elements, DType dtype) const {
    std::vector<std::byte> bytes(static_cast<size_t>(elements) * dtype_size(dtype));
    copy_bytes(bytes.data(), memory, std::ssize(bytes), stream_);
    synchronize(stream_);
    return to_floats(bytes, dtype);
  }

  void draw_weights() {
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      OpenUnit open = rank_->weights().open(u, true);
      for (const Piece& piece : pieces(layout_, units_[static_cast<size_t>(u)])) {
        const std::vector<float> all = drawn_values(piece.place->parameter);
        const std::vector<std::byte> bytes = to_bytes(
            std::vector<float>(all.begin() + piece.first, all.begin() + piece.first + piece.elements),
            type_of(*piece.place));
        copy_bytes(open.tensor(*piece.place), bytes.data(), std::ssize(bytes), stream_);
        synchronize(stream_);
      }
      open.close();
    }
  }

  // By Hugging Face names; a chunked head's pieces come in order.
  static void add(Tensors& out, const Piece& piece, const std::vector<float>& values) {
    const Parameter& p = piece.place->parameter;
    for (const ParameterPart& part : p.parts) {
      const int64_t begin = std::max(part.first * p.columns, piece.first),
                    end = std::min((part.first + part.rows) * p.columns, piece.first + piece.elements);
      if (begin >= end) continue;
      std::vector<float>& to = out[part.name];
      to.insert(to.end(), values.begin() + (begin - piece.first), values.begin() + (end - piece.first));
    }
  }

  Tensors weights(bool frozen_too) {
    Tensors out;
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      const OpenUnit open = rank_->weights().open(u, false);
      for (const Piece& piece : pieces(layout_, units_[static_cast<size_t>(u)])) {
        if (piece.place->frozen && !frozen_too) continue;
        add(out, piece, fetch(open.tensor(*piece.place), piece.elements, type_of(*piece.place)));
      }
    }
    return out;
  }

  Tensors gradients() {
    Tensors out;
    const Gradients& all = rank_->gradients();
    const auto size = static_cast<int64_t>(dtype_size(all.dtype()));
    for (int64_t u = 0; u < std::ssize(units_); ++u) {
      if (all.through_slots(u)) return {};
      const Unit& unit = units_[static_cast<size_t>(u)];
      for (const Piece& piece : pieces(layout_, unit)) {
        if (piece.place->frozen) continue;
        const int64_t from = piece.place->offset + piece.first - unit.first;
        add(out, piece, fetch(all.unit(u) + from * size, piece.elements, all.dtype()));
      }
    }
    return out;
  }

  Training t_;
  AdapterSpec adapter_{.r = 4, .alpha = 8, .rslora = false, .dropout = 0, .targets = {}};
  OptimizerConfig optimizer_;
  ModelLayout layout_;
  StreamView stream_;
  std::vector<Unit> units_;
  Plan plan_;
  std::unique_ptr<Rank> rank_;
};

}  // namespace

const std::vector<std::string>& families() {
  static const std::vector<std::string> all = {"llama", "llama3", "smollm2", "qwen2", "qwen3", "mistral"};
  return all;
}

const std::vector<std::string>& shapes() {
  static const std::vector<std::string> all = {"gpt2", "gemma", "cohere", "granite"};
  return all;
}

ModelSpec small_model(const std::string& family) {
  ModelSizes sizes{.layers = 2};
  if (family == "llama") sizes.kv_heads = 4;  // every head its own keys
  if (family == "llama3") sizes.kv_heads = 1;
  if (family == "smollm2") sizes.hidden = 72, sizes.heads = 9, sizes.kv_heads = 3, sizes.head_dim = 8;
  if (family == "qwen3") sizes.head_dim = 24;
  if (family == "large vocabulary") sizes.vocab = 9000;  // two segments of the head
  if (family == "large heads") sizes.vocab = 9000, sizes.hidden = 256, sizes.head_dim = 64;
  ModelSpec spec = llama_spec(sizes);
  spec.model_type = family;
  spec.max_positions = 512;
  spec.pad_token = kPadToken;
  spec.tied = family == "smollm2" || family == "gpt2" || family == "gemma" || family == "cohere";
  RopeSpec& rope = spec.ropes.front();
  if (family == "llama3") {
    rope.theta = 100;  // over 8 pairs this keeps, blends and divides frequencies
    rope.scaling = RopeSpec::Scaling::kLlama3, rope.factor = 8, rope.original_max_position = 64;
  }
  if (family == "qwen2") {
    for (LayerSpec& layer : spec.layers) layer.attention().qkv_bias = true;
    rope.theta = 20;  // a key bias moves all scores alike where positions hardly turn
    spec.layers.back().attention().window = 7;
  }
  if (family == "qwen3") norm_heads(spec);
  if (family == "mistral") set_windows(spec, 7);  // shorter than documents
  if (family == "biases") {
    add_biases(spec);
    rope.theta = 20;
  }
  if (family == "gpt2") {
    like_gpt2(spec, kMaxLength);
    // Where nothing turns, a key bias moves all scores alike: its gradient is rounding alone.
    for (LayerSpec& layer : spec.layers) layer.attention().qkv_bias = false;
  }
  if (family == "gemma") {
    like_gemma(spec);
    spec.head.logit_cap = 30;  // of logits around 8: close to the cap their gradient is rounding alone
  }
  if (family == "cohere") like_cohere(spec);
  if (family == "granite") like_granite(spec);
  if (family == "experts") like_qwen3_moe(spec);
  if (family == "all experts") like_qwen3_moe(spec, 3, 3);
  if (family == "many experts") like_qwen3_moe(spec, kExpertsAtOnce + 3);
  if (family == "shared expert") like_qwen2_moe(spec);
  if (family == "sigmoid router") like_glm4_moe(spec);
  if (family == "experts beside") {
    like_gemma4_moe(spec);
    spec.head.logit_cap = 30;  // as of Gemma's
  }
  if (family == "gpt-oss") like_gpt_oss(spec, 5, 2);
  if (family == "gpt-oss, all experts") {
    like_gpt_oss(spec, 3, 3);
    // The published limit. Of bf16 values close to a limit rounding decides whether they have a gradient; in
    // fp32 the models beside this one have a limit that bites.
    for (LayerSpec& layer : spec.layers) std::get<ExpertsSpec>(layer.sublayers[1].mixer).clamped->limit = 7;
  }
  if (family == "gpt-oss, many experts") like_gpt_oss(spec, kExpertsAtOnce + 3, 2);
  if (family.ends_with("experts")) spec.names.experts = "mlp.experts";
  return spec;
}

Outcome train(const Training& training, StreamView stream) {
  return Trainee(training, stream).train();
}

DeviceMemory device_memory(const Training& training, StreamView stream) {
  const int64_t before = cuda_device(0).free_bytes;
  const Trainee trainee(training, stream);
  return {trainee.planned_on_device(), before - cuda_device(0).free_bytes};
}

}  // namespace lm
