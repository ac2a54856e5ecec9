"""config.json of published models, as far as it says what the model computes: with fewer layers, and what lists layers cut
alike."""

LAYERS = 7  # more than any pattern of layers has


def pattern(every, count=LAYERS):
    return ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]


def wrapped(model_type, architecture, text, **top):
    return dict(model_type=model_type, architectures=[architecture], text_config=text, **top)


LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
GEMMA4_ROPE = dict(sliding_attention=dict(rope_type="default", rope_theta=1e4),
                   full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6))

PUBLISHED = {
    "Llama-3.2-1B": dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=2048, intermediate_size=8192, head_dim=64,
                         num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5,
                         rope_theta=5e5, rope_scaling=LLAMA3, max_position_embeddings=131072, tie_word_embeddings=True),
    "Phi-3-mini-4k": dict(model_type="phi3", architectures=["Phi3ForCausalLM"], hidden_size=3072, intermediate_size=8192,
                          num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=32, vocab_size=32064, rms_norm_eps=1e-5,
                          max_position_embeddings=4096, original_max_position_embeddings=4096, sliding_window=2047, rope_scaling=None,
                          rope_theta=10000.0, attention_bias=False, resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=32000),
    "Phi-3.5-mini": dict(model_type="phi3", architectures=["Phi3ForCausalLM"], hidden_size=3072, intermediate_size=8192,
                         num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=32, vocab_size=32064, rms_norm_eps=1e-5,
                         max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144,
                         rope_theta=10000.0, pad_token_id=32000,
                         rope_scaling=dict(type="longrope", short_factor=[1 + i / 64 for i in range(48)],
                                           long_factor=[1 + i for i in range(48)])),
    "Phi-4": dict(model_type="phi3", architectures=["Phi3ForCausalLM"], hidden_size=5120, intermediate_size=17920,
                  num_hidden_layers=LAYERS, num_attention_heads=40, num_key_value_heads=10, vocab_size=100352, rms_norm_eps=1e-5,
                  max_position_embeddings=16384, original_max_position_embeddings=16384, rope_theta=250000, rope_scaling=None,
                  sliding_window=None, pad_token_id=100349),
    "Phi-4-mini": dict(model_type="phi3", architectures=["Phi3ForCausalLM"], hidden_size=3072, intermediate_size=8192,
                       num_hidden_layers=LAYERS, num_attention_heads=24, num_key_value_heads=8, vocab_size=200064, rms_norm_eps=1e-5,
                       max_position_embeddings=131072, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
                       rope_theta=10000.0, tie_word_embeddings=True, sliding_window=262144, pad_token_id=199999, lm_head_bias=False,
                       rope_scaling=dict(type="longrope", short_factor=[1.0] * 48, long_factor=[1 + i / 3 for i in range(48)])),
    "Mistral-Small-3.1": wrapped("mistral3", "Mistral3ForConditionalGeneration", dict(
        model_type="mistral", hidden_size=5120, intermediate_size=32768, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=131072, rms_norm_eps=1e-5, rope_theta=1e9, sliding_window=None,
        max_position_embeddings=131072, hidden_act="silu")),
    "Ministral-3-8B": wrapped("mistral3", "Mistral3ForConditionalGeneration", dict(
        model_type="ministral3", hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=131072, rms_norm_eps=1e-5, sliding_window=None, max_position_embeddings=262144,
        rope_parameters=dict(rope_type="yarn", type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384,
                             max_position_embeddings=262144, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                             llama_4_scaling_beta=0.1)), tie_word_embeddings=False),
    "granite-3.3-2b": dict(model_type="granite", architectures=["GraniteForCausalLM"], hidden_size=2048, intermediate_size=8192,
                           num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, vocab_size=49159, rms_norm_eps=1e-5,
                           rope_theta=1e7, max_position_embeddings=131072, tie_word_embeddings=True, attention_multiplier=0.015625,
                           embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, pad_token_id=0),
    "granite-4.0-micro": dict(model_type="granitemoehybrid", architectures=["GraniteMoeHybridForCausalLM"], hidden_size=2560,
                              intermediate_size=8192, shared_intermediate_size=8192, num_hidden_layers=LAYERS, num_attention_heads=40,
                              num_key_value_heads=8, vocab_size=100352, rms_norm_eps=1e-5, rope_theta=10000000, tie_word_embeddings=True,
                              max_position_embeddings=131072, position_embedding_type="rope", layer_types=["attention"] * LAYERS,
                              num_local_experts=0, num_experts_per_tok=0, attention_multiplier=0.015625, embedding_multiplier=12,
                              logits_scaling=10, residual_multiplier=0.22, mamba_n_heads=128, mamba_d_head=40, pad_token_id=100256,
                              time_step_limit=[0.0, {"__float__": "Infinity"}]),
    "OLMo-2-7B": dict(model_type="olmo2", architectures=["Olmo2ForCausalLM"], hidden_size=4096, intermediate_size=11008,
                      num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=32, vocab_size=100352, rms_norm_eps=1e-6,
                      rope_theta=500000, max_position_embeddings=4096, pad_token_id=100277),
    "Olmo-3-7B": dict(model_type="olmo3", architectures=["Olmo3ForCausalLM"], hidden_size=4096, intermediate_size=11008,
                      num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=32, vocab_size=100278, rms_norm_eps=1e-6,
                      rope_theta=500000, max_position_embeddings=65536, sliding_window=4096, layer_types=pattern(4), pad_token_id=100277,
                      rope_scaling=dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, beta_fast=32, beta_slow=1,
                                        attention_factor=1.2079441541679836)),
    "gemma-2b": dict(model_type="gemma", architectures=["GemmaForCausalLM"], hidden_size=2048, intermediate_size=16384, head_dim=256,
                     num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=1, vocab_size=256000, rms_norm_eps=1e-6,
                     hidden_act="gelu", max_position_embeddings=8192, pad_token_id=0),
    "gemma-2-2b": dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"], hidden_size=2304, intermediate_size=9216, head_dim=256,
                       num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4, vocab_size=256000, rms_norm_eps=1e-6,
                       hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
                       sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, pad_token_id=0),
    "gemma-2-27b": dict(model_type="gemma2", architectures=["Gemma2ForCausalLM"], hidden_size=4608, intermediate_size=36864, head_dim=128,
                        num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=16, vocab_size=256000, rms_norm_eps=1e-6,
                        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=144, sliding_window=4096, pad_token_id=0,
                        attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "gemma-3-1b": dict(model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], hidden_size=1152, intermediate_size=6912,
                       head_dim=256, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=1, vocab_size=262144,
                       rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=512,
                       sliding_window_pattern=6, rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None,
                       max_position_embeddings=32768, attn_logit_softcapping=None, final_logit_softcapping=None, pad_token_id=0),
    # Only what differs from the class.
    "gemma-3-4b": wrapped("gemma3", "Gemma3ForConditionalGeneration", dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=LAYERS, sliding_window=1024,
        rope_scaling=dict(rope_type="linear", factor=8.0))),
    "gemma-3-27b": wrapped("gemma3", "Gemma3ForConditionalGeneration", dict(
        model_type="gemma3_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168, sliding_window=1024,
        rope_scaling=dict(rope_type="linear", factor=8.0))),
    "gemma-4-31b": wrapped("gemma4", "Gemma4ForConditionalGeneration", dict(
        model_type="gemma4_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=16, head_dim=256, global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True,
        hidden_size_per_layer_input=0, sliding_window=1024, final_logit_softcapping=30.0, rope_parameters=GEMMA4_ROPE,
        max_position_embeddings=262144, layer_types=pattern(6)), tie_word_embeddings=True),
    # Sizes of E2B; of its layers the first that are different in kind.
    "gemma-4-E2B": wrapped("gemma4", "Gemma4ForConditionalGeneration", dict(
        model_type="gemma4_text", hidden_size=1536, intermediate_size=6144, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=1, head_dim=256, global_head_dim=512, num_kv_shared_layers=5, use_double_wide_mlp=True,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, vocab_size=262144, sliding_window=512,
        final_logit_softcapping=30.0, rope_parameters=GEMMA4_ROPE, layer_types=pattern(5, 10)), tie_word_embeddings=True),
    "gemma-4-12b": wrapped("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", dict(
        model_type="gemma4_unified_text", hidden_size=3840, intermediate_size=15360, num_hidden_layers=LAYERS - 1, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, attention_k_eq_v=True, sliding_window=1024, final_logit_softcapping=30.0,
        use_bidirectional_attention="vision", rope_parameters=GEMMA4_ROPE, layer_types=pattern(6, LAYERS - 1),
        per_layer_config={"5": dict(head_dim=512, num_key_value_heads=1)}), tie_word_embeddings=True),
    "glm-4-9b-hf": dict(model_type="glm", architectures=["GlmForCausalLM"], hidden_size=4096, intermediate_size=13696, head_dim=128,
                        num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=2, vocab_size=151552,
                        rms_norm_eps=1.5625e-7, attention_bias=True, partial_rotary_factor=0.5, rope_theta=10000.0,
                        max_position_embeddings=8192, pad_token_id=151329, eos_token_id=[151329, 151336, 151338]),
    "GLM-4-9B-0414": dict(model_type="glm4", architectures=["Glm4ForCausalLM"], hidden_size=4096, intermediate_size=13696, head_dim=128,
                          num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=2, vocab_size=151552, rms_norm_eps=1e-5,
                          attention_bias=True, partial_rotary_factor=0.5, rope_theta=10000.0, max_position_embeddings=32768,
                          pad_token_id=151329),
    "gpt2": dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=768, n_layer=LAYERS, n_head=12, n_positions=1024, n_ctx=1024,
                 vocab_size=50257, activation_function="gelu_new", layer_norm_epsilon=1e-5, resid_pdrop=0.1, embd_pdrop=0.1,
                 attn_pdrop=0.1, bos_token_id=50256, eos_token_id=50256),
    "starcoder2-3b": dict(model_type="starcoder2", architectures=["Starcoder2ForCausalLM"], hidden_size=3072, intermediate_size=12288,
                          num_hidden_layers=LAYERS, num_attention_heads=24, num_key_value_heads=2, vocab_size=49152, norm_epsilon=1e-5,
                          hidden_act="gelu_pytorch_tanh", max_position_embeddings=16384, rope_theta=999999.4420358813, use_bias=True,
                          sliding_window=4096, attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1, bos_token_id=0,
                          eos_token_id=0),
    "c4ai-command-r-v01": dict(model_type="cohere", architectures=["CohereForCausalLM"], hidden_size=8192, intermediate_size=22528,
                               num_hidden_layers=LAYERS, num_attention_heads=64, num_key_value_heads=64, vocab_size=256000,
                               layer_norm_eps=1e-5, rope_theta=8000000.0, logit_scale=0.0625, max_position_embeddings=8192,
                               use_qk_norm=False, pad_token_id=0),
    "c4ai-command-r-plus": dict(model_type="cohere", architectures=["CohereForCausalLM"], hidden_size=12288, intermediate_size=33792,
                                num_hidden_layers=LAYERS, num_attention_heads=96, num_key_value_heads=8, vocab_size=256000,
                                layer_norm_eps=1e-5, rope_theta=75000000.0, logit_scale=0.8333333333333334, max_position_embeddings=8192,
                                use_qk_norm=True, pad_token_id=0),
    "c4ai-command-r7b": dict(model_type="cohere2", architectures=["Cohere2ForCausalLM"], hidden_size=4096, intermediate_size=14336,
                             head_dim=128, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, vocab_size=256000,
                             layer_norm_eps=1e-5, rope_theta=50000, logit_scale=0.25, sliding_window=4096, sliding_window_pattern=4,
                             max_position_embeddings=8192, pad_token_id=0),
    "Minitron-4B": dict(model_type="nemotron", architectures=["NemotronForCausalLM"], hidden_size=3072, intermediate_size=9216,
                        head_dim=128, num_hidden_layers=LAYERS, num_attention_heads=24, num_key_value_heads=8, vocab_size=256000,
                        norm_eps=1e-5, hidden_act="relu2", partial_rotary_factor=0.5, rope_theta=10000.0, max_position_embeddings=4096),
    "AFM-4.5B": dict(model_type="arcee", architectures=["ArceeForCausalLM"], hidden_size=2560, intermediate_size=18432, head_dim=128,
                     num_hidden_layers=LAYERS, num_attention_heads=20, num_key_value_heads=4, vocab_size=128004, rms_norm_eps=1e-5,
                     hidden_act="relu2", max_position_embeddings=65536, rope_theta=10000.0,
                     rope_scaling=dict(rope_type="yarn", factor=20.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
                                       mscale=1.0)),
    "EXAONE-4.0-32B": dict(model_type="exaone4", architectures=["Exaone4ForCausalLM"], hidden_size=5120, intermediate_size=27392,
                           head_dim=128, num_hidden_layers=LAYERS, num_attention_heads=40, num_key_value_heads=8, vocab_size=102400,
                           rms_norm_eps=1e-5, rope_theta=1000000, sliding_window=4096, sliding_window_pattern="LLLG",
                           layer_types=pattern(4), max_position_embeddings=131072, pad_token_id=0,
                           rope_scaling=dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                             original_max_position_embeddings=8192)),
    "EXAONE-4.0-1.2B": dict(model_type="exaone4", architectures=["Exaone4ForCausalLM"], hidden_size=2048, intermediate_size=4096,
                            head_dim=64, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=8, vocab_size=102400,
                            rms_norm_eps=1e-5, rope_theta=1000000, sliding_window=None, layer_types=["full_attention"] * LAYERS,
                            max_position_embeddings=65536, tie_word_embeddings=True, pad_token_id=0),
}

SIZES = dict(hidden_size=128, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=32, vocab_size=300000)


def least(model_type, **more):
    return dict(SIZES, model_type=model_type, **more)


# Files that name sizes alone: everything else is the class's default.
SPARSE = {
    "phi3": least("phi3"),
    "mistral": least("mistral"),
    "ministral3": least("ministral3"),
    "granite": least("granite"),
    "granitemoehybrid": least("granitemoehybrid", shared_intermediate_size=96, num_local_experts=0, layer_types=["attention"] * LAYERS),
    "olmo2": least("olmo2"),
    "olmo3": least("olmo3"),
    "qwen3_moe": least("qwen3_moe", num_experts=16),
    "olmoe": least("olmoe"),
    "mixtral": least("mixtral"),
    "gemma": least("gemma"),
    "gemma2": least("gemma2"),
    "gemma3_text": least("gemma3_text"),
    "gemma4_text": least("gemma4_text", hidden_size_per_layer_input=0),
    "gemma4_text with inputs": {**least("gemma4_text"), "vocab_size": 1000},
    "gemma4_unified_text": least("gemma4_unified_text"),
    "glm": least("glm"),
    "glm4": least("glm4"),
    "gpt2": dict(model_type="gpt2", n_embd=128, n_layer=LAYERS, n_head=4, vocab_size=300),
    "starcoder2": least("starcoder2"),
    "cohere": least("cohere"),
    "cohere2": least("cohere2"),
    "nemotron": least("nemotron", num_key_value_heads=32),
    "arcee": least("arcee"),
    "exaone4": least("exaone4"),
    # Without any size.
    "gemma3": wrapped("gemma3", "Gemma3ForConditionalGeneration", dict(model_type="gemma3_text")),
    "gemma4": wrapped("gemma4", "Gemma4ForConditionalGeneration", dict(model_type="gemma4_text", hidden_size_per_layer_input=0)),
    "gemma4_unified": wrapped("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", dict(model_type="gemma4_unified_text")),
    "mistral3": wrapped("mistral3", "Mistral3ForConditionalGeneration", dict(model_type="mistral"), tie_word_embeddings=False),
    "mistral3 of ministral3": wrapped("mistral3", "Mistral3ForConditionalGeneration", dict(model_type="ministral3"),
                                      tie_word_embeddings=True),
}

# Switches that the published files leave as they are.
SWITCHES = {
    "qwen3_moe with dense layers": least("qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True,
                                         decoder_sparse_step=2, mlp_only_layers=[1, 4], attention_bias=True, use_sliding_window=True,
                                         sliding_window=7),
    "olmoe that renormalises": least("olmoe", num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, num_key_value_heads=2),
    "mixtral with windows": least("mixtral", num_local_experts=4, sliding_window=9),
    "gemma with biases": least("gemma", attention_bias=True, tie_word_embeddings=False),
    "gemma2 without caps": least("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True),
    "gemma3_text in the form of transformers 5": least(
        "gemma3_text", final_logit_softcapping=20.0, layer_types=pattern(2), rope_parameters=dict(
            full_attention=dict(rope_type="yarn", factor=4.0, rope_theta=3e5, original_max_position_embeddings=1024),
            sliding_attention=dict(rope_type="default", rope_theta=5e3))),
    "gemma4_text without shared values": least("gemma4_text", hidden_size_per_layer_input=0, num_global_key_value_heads=2,
                                               attention_bias=True, layer_types=pattern(3)),
    "gemma4_text whose values are keys that others borrow": least(
        "gemma4_text", hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=2, num_kv_shared_layers=3,
        layer_types=pattern(3)),
    "gemma4_unified_text that borrows": least("gemma4_unified_text", num_kv_shared_layers=3, use_double_wide_mlp=True, layer_types=pattern(3)),
    "gemma4_text whose last layer slides": least("gemma4_text", hidden_size_per_layer_input=0, attention_k_eq_v=True,
                                                 num_global_key_value_heads=2, global_head_dim=64, head_dim=32,
                                                 layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]),
    "granitemoehybrid without positions": least("granitemoehybrid", shared_intermediate_size=96, num_local_experts=0,
                                                attention_bias=True, position_embedding_type="nope",
                                                layer_types=["full_attention"] * LAYERS),
    "granite with biases": least("granite", attention_bias=True, mlp_bias=True),
    "olmo2 with biases": least("olmo2", attention_bias=True, num_key_value_heads=8),
    "olmo3 in the form of transformers 5": least("olmo3", layer_types=pattern(3), rope_parameters=dict(
        full_attention=dict(rope_type="linear", factor=3.0), sliding_attention=dict(rope_type="default", rope_theta=2e4))),
    "glm without biases": least("glm", attention_bias=False, rope_parameters=dict(partial_rotary_factor=0.25, rope_theta=5e3)),
    "gpt2 with its switches": dict(model_type="gpt2", n_embd=128, n_layer=LAYERS, n_head=4, n_inner=96, n_positions=64, vocab_size=300,
                                   scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True, tie_word_embeddings=False),
    "gpt2 with plain scores": dict(model_type="gpt2", n_embd=128, n_layer=LAYERS, n_head=4, vocab_size=300, scale_attn_weights=False),
    "starcoder2 without biases": least("starcoder2", use_bias=False, sliding_window=7, tie_word_embeddings=False),
    "cohere with biases": least("cohere", attention_bias=True, tie_word_embeddings=False),
    "cohere2 with a list": least("cohere2", layer_types=pattern(2), attention_bias=True),
    "nemotron with biases": least("nemotron", num_key_value_heads=8, attention_bias=True, mlp_bias=True),
    "arcee with biases": least("arcee", attention_bias=True, mlp_bias=True),
    "exaone4 with a pattern": least("exaone4", sliding_window_pattern=3),
    "phi3 by parts": least("phi3", rope_parameters=dict(rope_type="default", rope_theta=5e3, partial_rotary_factor=0.5), head_dim=16),
}
