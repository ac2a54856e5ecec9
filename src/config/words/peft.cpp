#include "config/words/tables.h"

namespace lm {
namespace {

// LoraConfig, and the adapter_config.json that it writes.
constexpr Word kPeft[] = {
    to("base_model_name_or_path", "model.path"),
    to("r", "lora.r"),
    to("lora_alpha", "lora.alpha"),
    to("lora_dropout", "lora.dropout"),
    to("target_modules", "lora.targets", How::kTargets),
    to("use_rslora", "lora.rslora"),
    to("init_lora_weights", "lora.start", How::kLoraStart,
       "\"loftq\", \"pissa\", or the default; other starts are not there"),
    to("exclude_modules", "lora.exclude", How::kTargets),
    to("layers_to_transform", "lora.layers", How::kTargets),
    to("rank_pattern*", "lora.ranks", How::kTargets),
    to("alpha_pattern*", "lora.alphas", How::kTargets),
    to("use_dora", "lora.dora"),
    to("num_virtual_tokens", "prompt.length"),
    to("encoder_hidden_size", "prompt.hidden", How::kValue, "with train.method = \"ptuning\""),
    missing(
        "encoder_reparameterization_type",
        "the encoder of train.method = \"ptuning\" is an MLP, peft's default; an LSTM is not there: leave "
        "it out"),
    missing("encoder_num_layers", "an MLP has three layers, as in peft"),
    missing("encoder_dropout", "an MLP has none, as in peft"),
    missing("use_qalora", why::kLora),
    to("modules_to_save", "lora.also", How::kTargets),
    to("trainable_token_indices", "lora.tokens", How::kTargets),
    to("bias", "lora.bias"),
    missing("lora_bias", "B has no bias of its own"),
    when_on("target_parameters", "lora.experts", "true", "both matrices of all experts"),
    missing("layer_replication", "blocks are not repeated"),
    missing("loftq_config*", "lora.start = \"loftq\" with model.quantize"),
    missing("alora_invocation_tokens", why::kLora),
    missing("eva_config*", why::kLora),
    missing("corda_config*", why::kLora),
    missing("lora_ga_config*", why::kLora),
    missing("velora_config*", why::kLora),
    missing("monteclora_config*", why::kLora),
    missing("runtime_config*", why::kLora),
    missing("arrow_config*", why::kLora),
    missing("kasa_config*", why::kLora),
    missing("megatron_config*", why::kLora),
    unneeded("layers_pattern", "the model's family has its names"),
    unneeded("megatron_core", "lmlaunch has its own layers"),
    unneeded("ensure_weight_tying", "tied weights stay tied"),
    unneeded("qalora_group_size", why::kLora),
    unneeded("use_bdlora", why::kLora),
    unneeded("task_type", "causal language models"),
    to("peft_type", "train.method", How::kAdapter),
    unneeded("peft_*", "files of all versions are read"),
    unneeded("revision", "the snapshot in the hub cache that refs/main names is used"),
    unneeded("inference_mode", "the command decides: train, generate, chat"),
    unneeded("auto_mapping", "the model's family has its names"),
    unneeded("fan_in_fan_out", "the model's family decides the layout of its matrices"),
};

// FastLanguageModel, and the command line of Unsloth.
constexpr Word kUnsloth[] = {
    to("model_name", "model.path"),
    to("max_seq_length", "data.max_length"),
    when_on("load_in_4bit", "model.quantize", "\"nf4\"", "with train.method = \"lora\" or \"qlora\""),
    when_on("load_in_8bit", "model.quantize", "\"int8\"", "with train.method = \"lora\""),
    when_on("full_finetuning", "train.method", "\"full\""),
    to("r", "lora.r"),
    to("target_modules", "lora.targets", How::kTargets),
    to("lora_alpha", "lora.alpha"),
    to("use_rslora", "lora.rslora"),
    to("use_gradient_checkpointing", "train.recompute", How::kCheckpointing,
       "\"unsloth\" also moves block inputs: offload.activations = \"host\""),
    to("random_state", "run.seed"),
    missing("loftq_config", "lora.start = \"loftq\" with model.quantize"),
    missing("finetune_vision_layers", why::kVision),
    unneeded("fast_inference", "`lmlaunch generate` answers prompts"),
    unneeded("gpu_memory_utilization", "offload.device_memory limits what a run may use"),
    unneeded("max_lora_rank", "lora.r is the rank"),
    unneeded("unsloth_*", why::kFused),
    unneeded("train_on_responses_only", "data.loss_on = \"completion\" is the default"),
    unneeded("save_method", "`lmlaunch export` and its --merge, --adapter, --gguf"),
    unneeded("quantization_method", "`lmlaunch export --gguf f16, bf16 or q8_0`"),
};

}  // namespace

std::span<const Word> peft_words() {
  return kPeft;
}

std::span<const Word> unsloth_words() {
  return kUnsloth;
}

}  // namespace lm
