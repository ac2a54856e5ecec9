"""Tiny random models of the families beyond Llama's relatives, for tiny_models.py: of each family a plain one and one with odd sizes,
and both kinds of what a family leaves open. Windows are shorter than documents, so are the lengths from which RoPE is stretched and
Ministral's queries are scaled; soft caps are so low that they bend."""

# A key bias moves all scores of a query alike where positions hardly turn, and its gradient is then nothing but rounding:
# models with such biases turn fast.
FAST = 20.0

# Longer than the texts that longrope calls short (32), every one of them: how the reference turns depends on each batch, how
# this program does on the run. The first is the longest: dynamic RoPE remembers the longest text so far.
LONG = (60, 33, 47, 41, 36, 55)
SHORT = (17, 1, 30, 9, 24, 12, 3, 32)
STEPS = (17, 1, 60, 9, 44, 12)  # through four steps of a query scale of 16 positions


def base(layers=2, **more):
    """The sizes that most of them share."""
    return {**dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
                   num_hidden_layers=layers, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=None), **more}


def odd(layers=3, **more):
    """Nothing is a power of two, heads are wider than hidden / heads, one head of keys, and there is a pad token."""
    return {**dict(vocab_size=331, hidden_size=40, intermediate_size=104, num_attention_heads=5, num_key_value_heads=1, head_dim=12,
                   num_hidden_layers=layers, max_position_embeddings=250, bos_token_id=1, eos_token_id=2, pad_token_id=3), **more}


def gpt2(**sizes):
    return dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, **sizes)


def rope(theta=1e4, kind="default", **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


def yarn(**more):
    return rope(kind="yarn", **{**dict(rope_theta=100.0, factor=4.0, original_max_position_embeddings=16), **more})


def slides(*windows):
    return ["sliding_attention" if window else "full_attention" for window in windows]


LONGROPE = dict(original_max_position_embeddings=32, max_position_embeddings=128,
                rope_parameters=rope(100.0, "longrope", short_factor=[1.0, 1.1, 1.25, 1.4], long_factor=[1.0, 1.7, 2.9, 4.1],
                                     partial_rotary_factor=0.5, original_max_position_embeddings=32))
MINISTRAL = {**yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=4.0, beta_slow=1.0), "llama_4_scaling_beta": 0.3}
TWO_BASES = {"full_attention": rope(1000.0, "linear", factor=8.0), "sliding_attention": rope(100.0)}
YARN_OF_FULL = {"full_attention": yarn(), "sliding_attention": rope(100.0)}
GRANITE = dict(embedding_multiplier=6.0, logits_scaling=3.0, residual_multiplier=0.3, attention_multiplier=0.1)
HYBRID = dict(num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=8, **GRANITE)
# Of five layers the last three read the keys of the first two, two of them those of the same one.
INPUTS = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=600, num_kv_shared_layers=2, use_double_wide_mlp=True)
GEMMA4 = dict(global_head_dim=32, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1, sliding_window=7)

# Limits that some columns reach, and windows in every second layer.
# The limit is one that no value of the documents is within 2e-5 of: beside a limit a rounding changes gradients.
GPT_OSS = dict(sliding_window=7, swiglu_limit=0.5496, rope_parameters=yarn(truncate=False, rope_theta=FAST))

# A choice that a rounding changes is another model: what only fp32 can compare.
EXPERTS = {"dtypes": ["fp32"]}

# Where q and k are normed, and what a sublayer adds, too, gradients are steep: with all factors around 1 two bf16 runs of anything disagree.
CALM = {"norms": {"q_norm": 0.5, "k_norm": 0.5, "post_attention_layernorm": 0.5, "post_feedforward_layernorm": 0.5}}
UNSCALED = {"norms": {**CALM["norms"], "q_norm": 0.3, "k_norm": 0.3}}  # products of q and k are not divided by sqrt(d)
WITH_INPUTS = {"norms": {"q_norm": 0.2, "k_norm": 0.2, "post_attention_layernorm": 0.15, "post_feedforward_layernorm": 0.15, "post_per_layer_input_norm": 0.05}}

def unturned(head_dim, turned):
    """Columns of a head that RoPE leaves alone: a key's bias has no gradient there."""
    return [("self_attn.k_proj.bias", head_dim, turned, head_dim)]


# The other half of a file that holds a text model: as small as it can be.
PIXTRAL = dict(model_type="pixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
               image_size=28, patch_size=14)
SIGLIP = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28,
              patch_size=14)
IN_MISTRAL3 = {"wrapper": ("Mistral3", dict(vision_config=PIXTRAL, image_token_index=997, tie_word_embeddings=False))}
IN_GEMMA3 = {"wrapper": ("Gemma3", dict(vision_config=SIGLIP, image_token_index=997, boi_token_index=998, eoi_token_index=999, mm_tokens_per_image=1,
                                        tie_word_embeddings=True))}
GEMMA4_TOWER = dict(model_type="gemma4_vision", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=8, patch_size=4, position_embedding_size=8)
IN_GEMMA4 = {"wrapper": ("Gemma4", dict(vision_config=GEMMA4_TOWER, audio_config=None, image_token_id=997, boi_token_id=998, eoi_token_id=999,
                                        tie_word_embeddings=True))}

# name -> (config class, its arguments, how the directory is written and the model is run): tiny_models.MODELS has the words
FAMILIES = {
    "llama_dynamic_rope_past_its_positions":
        ("LlamaConfig", base(max_position_embeddings=32, rope_parameters=rope(100.0, "dynamic", factor=2.0), tie_word_embeddings=True),
         {"old_config": True, "lengths": LONG, "tool": {"max_length": max(LONG)}}),
    "llama_yarn_uncut_range":
        ("LlamaConfig", odd(rope_parameters=yarn(truncate=False, beta_fast=4.0, beta_slow=1.0)), {"old_config": True}),
    "phi3": ("Phi3Config", base(), {}),
    "phi3_odd_window": ("Phi3Config", odd(head_dim=8, sliding_window=7, tie_word_embeddings=True), {"old_config": True}),
    "phi3_partial_longrope_short_texts": ("Phi3Config", base(**LONGROPE), {"lengths": SHORT, "tool": {"max_length": 32}}),
    "phi3_partial_longrope_long_texts":
        ("Phi3Config", base(num_key_value_heads=1, **LONGROPE), {"old_config": True, "lengths": LONG, "tool": {"max_length": max(LONG)}}),
    "mistral_in_mistral3": ("MistralConfig", base(sliding_window=None, head_dim=16), IN_MISTRAL3),
    "ministral3_in_mistral3_odd":
        ("Ministral3Config", odd(sliding_window=None, rope_parameters=MINISTRAL), {**IN_MISTRAL3, "lengths": STEPS}),
    "ministral3": ("Ministral3Config", base(head_dim=16, rope_parameters=MINISTRAL), {"lengths": STEPS}),
    "ministral3_odd_window_factor":
        ("Ministral3Config", odd(sliding_window=7, rope_parameters={**yarn(beta_fast=4.0), "llama_4_scaling_beta": 0.5}), {"lengths": STEPS}),
    "granite": ("GraniteConfig", base(**GRANITE), {}),
    "granite_odd_biases_tied":
        ("GraniteConfig", odd(head_dim=8, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=rope(FAST), **GRANITE),
         {"old_config": True}),
    "granitemoehybrid_dense":
        ("GraniteMoeHybridConfig", base(shared_intermediate_size=96, layer_types=["attention"] * 2, position_embedding_type="rope", **HYBRID), {}),
    "granitemoehybrid_odd_without_positions":
        ("GraniteMoeHybridConfig", odd(head_dim=8, shared_intermediate_size=88, layer_types=["attention"] * 3, position_embedding_type=None,
                                       tie_word_embeddings=True, **HYBRID), {}),
    "olmo2": ("Olmo2Config", base(), {}),
    "olmo2_odd_tied": ("Olmo2Config", odd(head_dim=8, tie_word_embeddings=True), {**CALM, "old_config": True}),
    "olmo3_yarn_in_full_layers":
        ("Olmo3Config", base(4, layer_types=slides(1, 1, 0, 1), sliding_window=7, rope_parameters=YARN_OF_FULL), {**CALM, "old_config": True}),
    "olmo3_odd": ("Olmo3Config", odd(4, head_dim=8, sliding_window=7, rope_parameters=YARN_OF_FULL), CALM),
    "gemma": ("GemmaConfig", base(head_dim=16, pad_token_id=0), {}),
    "gemma_odd_old_name_of_gelu": ("GemmaConfig", odd(hidden_act="gelu"), {"old_config": True}),
    "gemma2": ("Gemma2Config", base(head_dim=16, pad_token_id=0, sliding_window=7, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
                                    final_logit_softcapping=3.0), {}),
    "gemma2_odd_without_caps":
        ("Gemma2Config", odd(layer_types=slides(0, 1, 1), sliding_window=7, query_pre_attn_scalar=12, attn_logit_softcapping=None,
                             final_logit_softcapping=None), {"old_config": True}),
    "gemma3_text":
        ("Gemma3TextConfig", base(4, head_dim=16, pad_token_id=0, layer_types=slides(1, 0, 1, 0), sliding_window=7, query_pre_attn_scalar=16,
                                  rope_parameters=TWO_BASES), CALM),
    "gemma3_text_odd_capped_old_keys":
        ("Gemma3TextConfig", odd(layer_types=slides(1, 0, 1), sliding_window=7, query_pre_attn_scalar=10, final_logit_softcapping=3.0,
                                 rope_parameters=TWO_BASES), {**CALM, "old_config": True}),
    "gemma3_text_in_gemma3":
        ("Gemma3TextConfig", base(3, head_dim=16, pad_token_id=0, layer_types=slides(1, 0, 1), sliding_window=7, query_pre_attn_scalar=16,
                                  rope_parameters=TWO_BASES), {**IN_GEMMA3, **CALM}),
    "gemma4_text":
        ("Gemma4TextConfig", base(4, head_dim=16, pad_token_id=0, layer_types=slides(1, 0, 1, 0), **GEMMA4), UNSCALED),
    "gemma4_text_odd_capped":
        ("Gemma4TextConfig", odd(layer_types=slides(1, 1, 0), sliding_window=7, global_head_dim=20, hidden_size_per_layer_input=0,
                                 attention_k_eq_v=False, final_logit_softcapping=3.0), UNSCALED),
    "gemma4_text_in_gemma4":
        ("Gemma4TextConfig", base(3, head_dim=16, pad_token_id=0, layer_types=slides(1, 0, 0), **GEMMA4), {**IN_GEMMA4, **UNSCALED}),
    "gemma4_text_experts":
        ("Gemma4TextConfig", base(3, head_dim=16, pad_token_id=0, layer_types=slides(1, 0, 0), enable_moe_block=True, num_experts=5,
                                  top_k_experts=2, moe_intermediate_size=24, **GEMMA4), {**UNSCALED, **EXPERTS}),
    "gemma4_text_odd_experts_in_gemma4":
        ("Gemma4TextConfig", odd(layer_types=slides(1, 1, 0), sliding_window=7, global_head_dim=20, hidden_size_per_layer_input=6,
                                 vocab_size_per_layer_input=1003, attention_k_eq_v=False, final_logit_softcapping=3.0, enable_moe_block=True,
                                 num_experts=7, top_k_experts=3, moe_intermediate_size=20, tie_word_embeddings=True),
         {**IN_GEMMA4, **WITH_INPUTS, **EXPERTS}),
    "gemma4_text_inputs_and_borrowed_keys":
        ("Gemma4TextConfig", base(4, head_dim=16, pad_token_id=0, layer_types=slides(1, 0, 0, 1), sliding_window=7, global_head_dim=32,
                                  **INPUTS), WITH_INPUTS),
    "gemma4_text_odd_inputs_in_gemma4":
        ("Gemma4TextConfig", odd(4, layer_types=slides(0, 1, 1, 0), sliding_window=7, global_head_dim=20, hidden_size_per_layer_input=6,
                                 vocab_size_per_layer_input=1003, num_kv_shared_layers=2, attention_k_eq_v=True,
                                 final_logit_softcapping=3.0, tie_word_embeddings=True), {**IN_GEMMA4, **WITH_INPUTS}),
    "qwen3_moe_one_dense_layer":
        ("Qwen3MoeConfig", base(3, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
                                mlp_only_layers=[1]), EXPERTS),
    "qwen3_moe_odd_without_renormalisation":
        ("Qwen3MoeConfig", odd(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20, decoder_sparse_step=2, norm_topk_prob=False,
                               attention_bias=True, tie_word_embeddings=True, rope_parameters=rope(FAST)), {**EXPERTS, "old_config": True}),
    "qwen2_moe_one_dense_layer":
        ("Qwen2MoeConfig", base(3, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40,
                                mlp_only_layers=[1], rope_parameters=rope(FAST)), EXPERTS),
    "qwen2_moe_odd_some_layers_slide":
        ("Qwen2MoeConfig", odd(4, head_dim=8, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20, shared_expert_intermediate_size=28,
                               norm_topk_prob=True, decoder_sparse_step=2, use_sliding_window=True, sliding_window=7, max_window_layers=3,
                               tie_word_embeddings=True, rope_parameters=rope(FAST)), EXPERTS),
    "granitemoe": ("GraniteMoeConfig", base(num_local_experts=5, num_experts_per_tok=2, intermediate_size=40, **GRANITE), EXPERTS),
    "granitemoe_odd_tied":
        ("GraniteMoeConfig", odd(head_dim=8, num_local_experts=4, num_experts_per_tok=3, intermediate_size=28, tie_word_embeddings=True,
                                 **GRANITE), {**EXPERTS, "old_config": True}),
    "olmoe": ("OlmoeConfig", base(num_experts=6, num_experts_per_tok=2, intermediate_size=40), {**CALM, **EXPERTS}),
    "gpt_oss": ("GptOssConfig", base(4, head_dim=16, num_local_experts=4, num_experts_per_tok=2, **GPT_OSS), EXPERTS),
    "gpt_oss_odd_without_biases":
        ("GptOssConfig", odd(num_local_experts=5, num_experts_per_tok=3, attention_bias=False, layer_types=slides(0, 1, 1), tie_word_embeddings=True,
                             **{**GPT_OSS, "swiglu_alpha": 1.2, "rope_parameters": rope(100.0)}), {**EXPERTS, "old_config": True}),
    "mixtral": ("MixtralConfig", base(num_local_experts=4, num_experts_per_tok=2, intermediate_size=40, sliding_window=7), EXPERTS),
    "mixtral_odd": ("MixtralConfig", odd(num_local_experts=5, num_experts_per_tok=2, sliding_window=None), EXPERTS),
    "glm": ("GlmConfig", base(head_dim=16, rope_parameters=rope(FAST, partial_rotary_factor=0.5)), {"idle": unturned(16, 8)}),
    "glm_odd_without_biases":
        ("GlmConfig", odd(attention_bias=False, tie_word_embeddings=True, rope_parameters=rope(100.0, partial_rotary_factor=0.5)),
         {"old_config": True}),
    "glm4": ("Glm4Config", base(head_dim=16, rope_parameters=rope(FAST, partial_rotary_factor=0.5)), {"idle": unturned(16, 8)}),
    "glm4_odd_biases":
        ("Glm4Config", odd(attention_bias=True, rope_parameters=rope(FAST, partial_rotary_factor=0.5)),
         {"old_config": True, "idle": unturned(12, 6)}),
    "glm4_moe":
        ("Glm4MoeConfig", base(3, head_dim=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, use_qk_norm=True,
                               first_k_dense_replace=1, rope_parameters=rope(FAST, partial_rotary_factor=0.5)), EXPERTS),
    "glm4_moe_odd_groups_without_renormalisation":
        ("Glm4MoeConfig", odd(n_routed_experts=12, n_group=4, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=2,
                              routed_scaling_factor=1.7, norm_topk_prob=False, first_k_dense_replace=1, attention_bias=True,
                              tie_word_embeddings=True, rope_parameters=rope(FAST, partial_rotary_factor=0.5)),
         {**EXPERTS, "old_config": True, "idle": unturned(12, 6)}),
    "minimax_m2":
        ("MiniMaxM2Config", base(head_dim=16, num_local_experts=5, num_experts_per_tok=2, intermediate_size=24,
                                 rope_parameters=rope(100.0, partial_rotary_factor=0.5)), {**CALM, **EXPERTS}),
    "minimax_m2_odd_tied":
        ("MiniMaxM2Config", odd(num_local_experts=4, num_experts_per_tok=3, intermediate_size=28, tie_word_embeddings=True,
                                rope_parameters=rope(100.0, partial_rotary_factor=0.5)), {**CALM, **EXPERTS, "old_config": True}),
    "gpt2": ("GPT2Config", gpt2(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256), {"idle": [("attn.c_attn.bias", 192, 64, 128)]}),
    "gpt2_odd_own_width":
        ("GPT2Config", gpt2(vocab_size=331, n_embd=40, n_layer=3, n_head=5, n_inner=104, n_positions=99),
         {"max_shard_size": "40KB", "idle": [("attn.c_attn.bias", 120, 40, 80)]}),
    "starcoder2": ("Starcoder2Config", base(sliding_window=7, rope_parameters=rope(FAST)), {}),
    "starcoder2_odd_without_biases":
        ("Starcoder2Config", odd(head_dim=8, use_bias=False, tie_word_embeddings=False, residual_dropout=0.0), {"old_config": True}),
    "cohere_norms_of_each_head": ("CohereConfig", base(use_qk_norm=True, logit_scale=0.25, pad_token_id=0), CALM),
    "cohere2": ("Cohere2Config", base(4, sliding_window=7, logit_scale=0.25, pad_token_id=0), {}),
    "cohere2_odd_every_second_slides":
        ("Cohere2Config", odd(head_dim=8, layer_types=slides(1, 0, 1), sliding_window=7, logit_scale=0.5, tie_word_embeddings=False,
                              rope_parameters=rope(100.0)), {"old_config": True}),
    "nemotron": ("NemotronConfig", base(head_dim=16), {}),
    "nemotron_odd_quarter_turns":
        ("NemotronConfig", odd(head_dim=16, tie_word_embeddings=True, rope_parameters=rope(100.0, partial_rotary_factor=0.25)), {"old_config": True}),
    "arcee": ("ArceeConfig", base(), {}),
    "arcee_odd_biases": ("ArceeConfig", odd(attention_bias=True, mlp_bias=True, rope_parameters=rope(FAST)), {"old_config": True}),
    "exaone4": ("Exaone4Config", base(4, sliding_window=7, sliding_window_pattern=2), CALM),
    "exaone4_odd_without_windows": ("Exaone4Config", odd(head_dim=8, layer_types=slides(0, 0, 0), sliding_window=None, tie_word_embeddings=True), CALM),
}

# One for each kernel, or way through one, that Llama and its near relatives do not have.
KERNELS = ["gemma2", "gemma3_text", "gemma4_text", "phi3_partial_longrope_long_texts", "glm4", "gpt2", "cohere2", "nemotron",
           "olmo3_yarn_in_full_layers", "ministral3", "granite", "starcoder2", "gemma4_text_inputs_and_borrowed_keys"]
# On a GPU in fp32 alone: what bf16 rounds otherwise chooses other experts. Of sizes that are read 16 bytes at a time, and odd ones.
ROUTED = ["qwen3_moe_one_dense_layer", "qwen3_moe_odd_without_renormalisation", "gemma4_text_experts"]
