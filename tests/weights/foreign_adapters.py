"""Adapters of every kind that peft makes, with every key of their configurations, and what becomes of them here: read, or refused by the key.
Used with the library of files (interop_test.py) and with the whole program (../e2e/test_foreign_adapters.py)."""

import peft

# Adapters that peft makes of one small model: LoraConfig's arguments, and the keys that are then written otherwise into
# adapter_config.json. "refused": the key that the refusal names.
NAMES = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "all_linear": dict(target_modules="all-linear"),
    "two_modules": dict(target_modules=["q_proj", "v_proj"]),
    "rslora": dict(target_modules=["o_proj"], use_rslora=True),
    "paths_in_a_layer": dict(target_modules=["self_attn.q_proj", "mlp.up_proj"]),
    "module_of_one_layer": dict(target_modules=["1.self_attn.q_proj", "down_proj"]),
    "whole_paths": dict(target_modules=["model.layers.2.self_attn.o_proj", "model.layers.0.mlp.up_proj"]),
    "regex": dict(target_modules=r".*\.(q|v)_proj"),
    "regex_of_layers": dict(target_modules=r"model\.layers\.[01]\..*_proj"),
    "regex_with_groups": dict(target_modules=r".*(?:mlp|self_attn)\.(?:up|o)_proj"),
    "regex_looking_ahead": dict(target_modules=r"(?!.*\.1\.).*[qk]_proj"),
    "regex_named_group": dict(target_modules=r"(?P<any>.*)q_proj"),
    "regex_of_pythons_end": dict(target_modules=r".*up_proj\Z"),
    "regex_ignoring_case": dict(target_modules=r"(?i).*Q_PROJ"),
    "exclude": dict(target_modules="all-linear", exclude_modules=["k_proj", "mlp.up_proj"]),
    "exclude_a_path": dict(target_modules=NAMES, exclude_modules=["model.layers.1.self_attn.q_proj"]),
    "exclude_a_layer": dict(target_modules=NAMES, exclude_modules=r".*\.layers\.1\..*"),
    "exclude_beside_a_regex": dict(target_modules=r".*_proj", exclude_modules=["gate_proj"]),
    "exclude_nothing": dict(target_modules=NAMES, exclude_modules=["lm_head"]),
    "one_layer": dict(target_modules=NAMES, layers_to_transform=1),
    "two_layers": dict(target_modules=NAMES, layers_to_transform=[0, 2]),
    "layers_by_name": dict(target_modules=NAMES, layers_to_transform=[0, 2], layers_pattern="layers"),
    "layers_by_names": dict(target_modules=NAMES, layers_to_transform=[2], layers_pattern=["blocks", "layers"]),
    "a_path_beside_layers": dict(target_modules=["q_proj", "model.layers.0.mlp.up_proj"], layers_to_transform=[1]),
    "rank_of_a_name": dict(target_modules=NAMES, rank_pattern={"q_proj": 8}),
    "rank_of_a_path": dict(target_modules=NAMES, rank_pattern={"model.layers.0.self_attn.q_proj": 2}),
    "rank_of_the_end_of_a_path": dict(target_modules=NAMES, rank_pattern={"1.self_attn.q_proj": 3}),
    "rank_of_layers": dict(target_modules="all-linear", rank_pattern={r"layers\.[12]\..*": 3}),
    "rank_of_a_begin": dict(target_modules=NAMES, rank_pattern={"^model.layers.0.*": 6}),
    "rank_where_a_point_is_any": dict(target_modules=NAMES, rank_pattern={"down.proj": 6}),
    "rank_of_no_end": dict(target_modules=NAMES, rank_pattern={"_proj": 6, "proj": 6, "q": 6}),
    "rank_of_none": dict(target_modules=NAMES, rank_pattern={"lm_head": 6}),
    "rank_of_all": dict(target_modules=NAMES, rank_pattern={".*": 6}),
    "first_rank_counts": dict(target_modules=NAMES, rank_pattern={".*mlp.*": 2, "down_proj": 7}),
    "alpha_of_a_name": dict(target_modules=NAMES, alpha_pattern={"q_proj": 8}),
    "alpha_of_a_path": dict(target_modules=NAMES, alpha_pattern={"model.layers.2.mlp.down_proj": 1}),
    "alpha_of_a_layer": dict(target_modules=NAMES, alpha_pattern={r".*\.1\..*": 32}),
    "alpha_that_is_no_integer": dict(target_modules=NAMES, alpha_pattern={"v_proj": 0.5}),
    "first_alpha_counts": dict(target_modules=NAMES, alpha_pattern={r"[a-z.0-9]*q_proj": 3, "q_proj": 5}),
    "alpha_with_rslora": dict(target_modules=NAMES, alpha_pattern={"q_proj": 8}, use_rslora=True),
    "ranks_and_alphas": dict(target_modules="all-linear", rank_pattern={"mlp.*": 2, "q_proj": 9}, alpha_pattern={"q_proj": 3, "up_proj": 24}),
    "ranks_with_rslora": dict(target_modules="all-linear", rank_pattern={"q_proj": 9}, alpha_pattern={"k_proj": 3}, use_rslora=True),
    "everything": dict(target_modules=[*NAMES, "k_proj", "o_proj"], exclude_modules=["o_proj"], layers_to_transform=[0, 1], rank_pattern={"0.*": 2},
                       alpha_pattern={"k_proj": 3}, use_rslora=True),
    "dora": dict(target_modules=NAMES, use_dora=True),
    "dora_with_ranks": dict(target_modules=NAMES, use_dora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 9}),
    "rank_one": dict(target_modules=NAMES, r=1),
    "negative_alpha": dict(target_modules=NAMES, lora_alpha=-3),
    "dropout": dict(target_modules=NAMES, lora_dropout=0.3),
    "no_task": dict(target_modules=NAMES, task_type=None),
    "random_start": dict(target_modules=NAMES, init_lora_weights=False),
    "gaussian_start": dict(target_modules=NAMES, init_lora_weights="gaussian"),
    "orthogonal_start": dict(target_modules=NAMES, init_lora_weights="orthogonal"),
    "weight_tying": dict(target_modules=NAMES, ensure_weight_tying=True),
    "no_modules_to_save": dict(target_modules=NAMES, modules_to_save=[]),
    "eva_start": (dict(target_modules=NAMES), dict(init_lora_weights="eva", eva_config={"rho": 2.0})),
    "order_of_the_file": (dict(target_modules=NAMES, alpha_pattern={"v_proj": 5}), dict(alpha_pattern={"v_proj": 5, ".*v_proj": 4})),
    "bias_all": dict(target_modules=NAMES, bias="all"),
    "bias_lora_only": dict(target_modules=NAMES, bias="lora_only"),
    "bias_of_all_and_patterns": dict(target_modules="all-linear", bias="all", rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 9}),
    "bias_with_dora": dict(target_modules=["o_proj"], bias="lora_only", use_dora=True),
    "bias_of_none": dict(target_modules=["up_proj"], bias="lora_only"),
    "lora_bias": (dict(target_modules=NAMES, lora_bias=True), "lora_bias"),
    "modules_to_save": dict(target_modules=NAMES, modules_to_save=["embed_tokens", "lm_head", "norm"]),
    "the_last_norm_alone": dict(target_modules=NAMES, modules_to_save=["model.norm"]),
    "linear_layers_to_save": (dict(target_modules=NAMES, modules_to_save=["up_proj"]), "modules_to_save"),
    "trainable_tokens": dict(target_modules=NAMES, trainable_token_indices=[1, 2, 7]),
    "trainable_tokens_of_a_head": (dict(target_modules=NAMES, trainable_token_indices={"lm_head": [1, 2]}), "trainable_token_indices"),
    "embedding": dict(target_modules=["embed_tokens", "q_proj"]),
    "head": dict(target_modules=["lm_head", "q_proj"]),
    "head_with_a_rank": dict(target_modules=["lm_head", "q_proj"], rank_pattern={"lm_head": 2}, alpha_pattern={"head": 3, "lm_head": 5}),
    "head_and_layers": dict(target_modules=["lm_head", "q_proj"], layers_to_transform=[0, 2]),
    "pissa": (dict(target_modules=NAMES, init_lora_weights="pissa"), "init_lora_weights"),
    "pissa_niter": (dict(target_modules=NAMES, init_lora_weights="pissa_niter_4"), "init_lora_weights"),
    "olora": (dict(target_modules=NAMES, init_lora_weights="olora"), "init_lora_weights"),
    "rank_by_a_named_group": (dict(target_modules=NAMES, rank_pattern={"(?P<x>q)_proj": 8}), "rank_pattern"),
    "alpha_by_looking_behind": (dict(target_modules=NAMES, alpha_pattern={"(?:q|v)_proj(?<=q_proj)": 8}), "alpha_pattern"),
    "layers_by_an_expression": (dict(target_modules=NAMES, layers_to_transform=[0], layers_pattern="l.*s"), "layers_pattern"),
    "exclude_by_a_named_group": (dict(target_modules=NAMES, exclude_modules="(?P<x>.*)q_proj"), "exclude_modules"),
}
# Keys that peft writes in cases that this model or the test cannot have, and files that disagree with themselves.
EDITED = {
    "target_parameters": ["mlp.experts.gate_up_proj"], "layer_replication": [[0, 2], [1, 3]], "fan_in_fan_out": True,
    "bias": "boft_only", "use_qalora": True, "use_bdlora": {"nblocks": 2}, "kasa_config": {"beta": 1}, "velora_config": {"rank": 1}, "monteclora_config": {"k": 1},
    "arrow_config": {"top_k": 2}, "alora_invocation_tokens": [1], "megatron_config": {"x": 1}, "corda_config": {"x": 1},
    "lora_ga_config": {"x": 1}, "loftq_config": {"loftq_bits": 4}, "key_of_tomorrow": 1, "peft_type": "ADALORA", "task_type": "SEQ_CLS",
    "r": 5, "rank_pattern": {"q_proj": 2}, "layers_to_transform": [0], "target_modules": ["q_proj", "v_proj"], "exclude_modules": ["q_proj"],
    "layers_pattern": "layers",
}
for key, value in EDITED.items():
    named = {"r": "shape", "rank_pattern": "shape", "layers_to_transform": "unexpected", "target_modules": "unexpected",
             "exclude_modules": "unexpected"}.get(key, key)
    ADAPTERS["edited_" + key] = (dict(target_modules=NAMES), {key: value}, named)
ADAPTERS["regex_of_fewer"] = (dict(target_modules=NAMES), dict(target_modules=".*q_proj"), "target_modules")
ADAPTERS["regex_beside_layers"] = (dict(target_modules=NAMES), dict(target_modules=".*(q|v|down)_proj", layers_to_transform=[0]), "layers_to_transform")


def case_of(name):
    """(LoraConfig's arguments, keys that are written otherwise, what the refusal names or None)"""
    case = ADAPTERS[name]
    if isinstance(case, dict):
        return case, {}, None
    arguments, *rest = case
    edits = next((part for part in rest if isinstance(part, dict)), {})
    return arguments, edits, next((part for part in rest if isinstance(part, str)), None)


# Adapters without pairs of low rank: (configuration, arguments, edits of adapter_config.json, the key that is refused).
OTHERS = {
    "ia3": (peft.IA3Config, {}, {}, None),
    "ia3 of an expression": (peft.IA3Config, dict(target_modules=r".*\.1\..*(q_proj|down_proj)", feedforward_modules=["down_proj"]), {}, None),
    "ia3 everywhere": (peft.IA3Config, dict(target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], feedforward_modules=["down_proj"]), {}, None),
    "norms": (peft.LNTuningConfig, {}, {}, None),
    "norms of heads and the last": (peft.LNTuningConfig, dict(target_modules=["k_norm", "norm", "layers.2.input_layernorm"]), {}, None),
    "scaled inputs of others": (peft.IA3Config, dict(target_modules=["q_proj", "o_proj"], feedforward_modules=["o_proj"]), {}, "feedforward_modules"),
    "scaled output of down": (peft.IA3Config, dict(target_modules=["down_proj"], feedforward_modules=[]), {}, "feedforward_modules"),
    "excluded": (peft.IA3Config, {}, {"exclude_modules": ["q_proj"]}, "exclude_modules"),
    "a key of LoRA": (peft.IA3Config, {}, {"use_dora": True}, "use_dora"),
    "excluded norms": (peft.LNTuningConfig, {}, {"exclude_modules": ["norm"]}, "exclude_modules"),
    "fan in fan out": (peft.IA3Config, {}, {"fan_in_fan_out": True}, "fan_in_fan_out"),
    "no fan in fan out": (peft.IA3Config, dict(fan_in_fan_out=False, init_ia3_weights=True, modules_to_save=None), {}, None),
    "factors and a head": (peft.IA3Config, {}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "other norms": (peft.LNTuningConfig, {}, {"target_modules": ["norm"]}, "target_modules"),
    "trained whole": (peft.LNTuningConfig, {}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "prefix": (peft.PrefixTuningConfig, dict(num_virtual_tokens=3), {}, None),
    "prompt": (peft.PromptTuningConfig, dict(num_virtual_tokens=4), {}, None),
    "prompt of an older file": (peft.PromptTuningConfig, dict(num_virtual_tokens=4), {"num_layers": None, "token_dim": None}, None),
    "a projected prefix": (peft.PrefixTuningConfig, dict(num_virtual_tokens=3), {"prefix_projection": True}, "prefix_projection"),
    "a prefix of another model": (peft.PrefixTuningConfig, dict(num_virtual_tokens=3), {"token_dim": 999}, "token_dim"),
    "a prefix of other heads": (peft.PrefixTuningConfig, dict(num_virtual_tokens=3), {"num_attention_heads": 1}, "num_attention_heads"),
    "more tokens than there are": (peft.PrefixTuningConfig, dict(num_virtual_tokens=3), {"num_virtual_tokens": 4}, "prompt_embeddings"),
    "no number of tokens": (peft.PromptTuningConfig, dict(num_virtual_tokens=4), {"num_virtual_tokens": None}, "num_virtual_tokens"),
    "an encoder and a decoder": (peft.PromptTuningConfig, dict(num_virtual_tokens=4), {"num_transformer_submodules": 2}, "num_transformer_submodules"),
    "modules of a prompt": (peft.PromptTuningConfig, dict(num_virtual_tokens=4), {"target_modules": ["q_proj"]}, "target_modules"),
    "a prompt for labels": (peft.PromptTuningConfig, dict(num_virtual_tokens=4), {"task_type": "SEQ_CLS"}, "task_type"),
    "an encoded prompt": (peft.PromptEncoderConfig, dict(num_virtual_tokens=4), {}, None),
    "a prompt of several tasks": (peft.PromptTuningConfig, dict(num_virtual_tokens=4), {"peft_type": "MULTITASK_PROMPT_TUNING"}, "MULTITASK_PROMPT_TUNING"),
}
# Kinds of adapters that are read; every other one is refused by its name, whatever its keys.
KINDS = {"LORA", "IA3", "LN_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"}
for kind in sorted({kind.value for kind in peft.PeftType} - KINDS - {"ADALORA"}):  # that one is in EDITED
    ADAPTERS["kind_" + kind.lower()] = (dict(target_modules=NAMES), {"peft_type": kind}, "peft_type")

# Keys that say nothing of what an adapter computes: written by peft beside the others, in every case.
SILENT = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config", "megatron_core",
          "qalora_group_size"}


def keys_without_a_case():
    """Of the configurations of the kinds that are read: all keys have a case, those of tomorrow fail here."""
    lora = {key for name in ADAPTERS for part in case_of(name)[:2] for key in part}
    out = set(peft.LoraConfig.__dataclass_fields__) - SILENT - lora
    for make in (peft.IA3Config, peft.LNTuningConfig):
        keys = {"task_type", "peft_type"} | {key for made, arguments, edits, _ in OTHERS.values() if made is make for key in (*arguments, *edits)}
        out |= {f"{make.__name__}.{key}" for key in set(make.__dataclass_fields__) - SILENT - keys}
    return out
