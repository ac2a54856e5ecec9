"""What does a step of each family cost beside a Llama that does the same multiplications?

Both have matrices of the same sizes (an MLP without a gate is set against a gated one of two thirds its width), random weights and tokens,
bf16, 2 x 512 tokens, and windows that are longer than these. They are processes of their own that take turns, one step each, and begin
by turns; medians are compared. The ceiling's column names what a family computes that a Llama does not.
Usage: families.py BIN_DIR [--smoke] [--rounds 15] [--threads 2] [--only FAMILY]
"""

import json
from dataclasses import dataclass

from figures import Figure, Figures, common_options
from processes import Side

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, POSITIONS = 512, 1536, 6, 8, 4, 64, 8192, 1024
SMOKE = {"hidden": 128, "ffn": 384, "layers": 2, "heads": 2, "kv_heads": 1, "vocab": 512}
SEQUENCES, LENGTH = 2, 512
TARGET = 1.05
GATED_SHARE = 2 / 3  # of the width of an MLP without a gate: three matrices in place of two


@dataclass(frozen=True)
class Sizes:
    hidden: int = HIDDEN
    ffn: int = FFN
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    vocab: int = VOCAB
    tied: bool = False

    def keys(self):
        return {"hidden_size": self.hidden, "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "head_dim": HEAD_DIM, "vocab_size": self.vocab, "tie_word_embeddings": self.tied,
                "max_position_embeddings": POSITIONS, "rope_theta": 1e4, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
                "pad_token_id": None}


@dataclass(frozen=True)
class Family:
    model_type: str
    architecture: str
    more: dict        # keys of its own; a function of Sizes where they hold some
    reason: str = ""  # what it computes that a Llama does not
    gated: bool = True
    tied: bool = False
    grouped: bool = True  # several heads share their keys


def gpt2(sizes):
    return {"n_embd": sizes.hidden, "n_inner": sizes.ffn, "n_layer": sizes.layers, "n_head": sizes.heads, "n_positions": POSITIONS,
            "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


def dense(sizes):
    return {"shared_intermediate_size": sizes.ffn, "layer_types": ["attention"] * sizes.layers, "num_local_experts": 0, "num_experts_per_tok": 0,
            "position_embedding_type": "rope", **MULTIPLIERS}


def unwindowed(sizes):
    return {"sliding_window": None, "layer_types": ["full_attention"] * sizes.layers}


def one_width(sizes):
    """All of Gemma 4's heads alike."""
    return {"hidden_activation": GELU, "global_head_dim": HEAD_DIM, "hidden_size_per_layer_input": 0, "attention_k_eq_v": False, "sliding_window": WINDOW}


GELU, WINDOW = "gelu_pytorch_tanh", 4096
MULTIPLIERS = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": HEAD_DIM, "sliding_window": WINDOW}
TWO_NORMS, FOUR_NORMS = "norms behind sublayers", "norms before and behind sublayers"
HALF = {"partial_rotary_factor": 0.5}

FAMILIES = [
    Family("phi3", "Phi3ForCausalLM", {}),
    Family("mistral", "MistralForCausalLM", {"sliding_window": None}),
    Family("ministral3", "Ministral3ForCausalLM",
           {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 256, "mscale": 1.0,
                                "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1}},
           "queries scaled by position"),
    Family("granite", "GraniteForCausalLM", MULTIPLIERS, "embedding and sublayers scaled", tied=True),
    Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", dense, "embedding and sublayers scaled", tied=True),
    Family("olmo2", "Olmo2ForCausalLM", {}, f"{TWO_NORMS}, of q and of k"),
    Family("olmo3", "Olmo3ForCausalLM", {"sliding_window": WINDOW}, f"{TWO_NORMS}, of q and of k"),
    Family("gemma", "GemmaForCausalLM", {"hidden_act": GELU}, "GELU, embedding scaled", tied=True),
    Family("gemma2", "Gemma2ForCausalLM", {"hidden_activation": GELU, **CAPS}, f"GELU, {FOUR_NORMS}, capped scores and logits", tied=True),
    Family("gemma3_text", "Gemma3ForCausalLM", {"hidden_activation": GELU, "query_pre_attn_scalar": HEAD_DIM, "sliding_window": WINDOW},
           f"GELU, {FOUR_NORMS}, of q and of k", tied=True),
    Family("gemma4_text", "Gemma4ForCausalLM", one_width, f"GELU, {FOUR_NORMS}, of q, k and v, layers scaled", tied=True),
    Family("glm", "GlmForCausalLM", {"attention_bias": True, **HALF}, "biases"),
    Family("glm4", "Glm4ForCausalLM", {"attention_bias": False, **HALF}, FOUR_NORMS),
    Family("gpt2", "GPT2LMHeadModel", gpt2, "LayerNorm, GELU, biases, learned positions", gated=False, tied=True, grouped=False),
    Family("starcoder2", "Starcoder2ForCausalLM", {"hidden_act": GELU, "use_bias": True, "sliding_window": None}, "LayerNorm, GELU, biases",
           gated=False, tied=True),
    Family("cohere2", "Cohere2ForCausalLM", {"sliding_window": WINDOW, "logit_scale": 0.25}, "LayerNorm", tied=True),
    Family("nemotron", "NemotronForCausalLM", {"hidden_act": "relu2", **HALF}, "LayerNorm", gated=False),
    Family("arcee", "ArceeForCausalLM", {"hidden_act": "relu2"}, gated=False),
    Family("exaone4", "Exaone4ForCausalLM", unwindowed, f"{TWO_NORMS}, of q and of k"),
]


def sizes_of(family, options):
    sizes = Sizes(**(SMOKE if options.smoke else {}), tied=family.tied)
    return sizes if family.grouped else Sizes(**{**vars(sizes), "kv_heads": sizes.heads})


def shape_of(family, sizes):
    """Its config.json, with GPT-2's own words beside the common ones."""
    more = family.more(sizes) if callable(family.more) else family.more
    return {**sizes.keys(), **more, "model_type": family.model_type, "architectures": [family.architecture]}


def llama_of(family, sizes):
    ffn = sizes.ffn if family.gated else round(sizes.ffn * GATED_SHARE)
    keys = Sizes(**{**vars(sizes), "ffn": ffn}).keys()
    return {**keys, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def matrix_elements(shape):
    """Of the matrices that tokens are multiplied with, the head included: both sides' must be the same."""
    hidden, heads = shape["hidden_size"], 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    matrices = 2 if shape["model_type"] in {family.model_type for family in FAMILIES if not family.gated} else 3
    return shape["num_hidden_layers"] * hidden * (HEAD_DIM * heads + matrices * shape["intermediate_size"]) + shape["vocab_size"] * hidden


def compare(options, family, rounds):
    """The medians of both, in milliseconds."""
    sizes = sizes_of(family, options)
    shapes = [shape_of(family, sizes), llama_of(family, sizes)]
    if matrix_elements(shapes[0]) != matrix_elements(shapes[1]):
        raise ValueError(f"{family.model_type}: the Llama beside it has other products")
    sides = [Side([str(options.bin_dir / "train_step_bench"), json.dumps(shape), "full", "bf16", str(options.threads), str(SEQUENCES), str(LENGTH),
                   "gemm_tflops=1"]) for shape in shapes]
    warm = 1 if options.smoke else 2
    for i in range(rounds + warm):
        for side in sides if i % 2 == 0 else reversed(sides):
            side.step()
    for side in sides:
        side.finish()
    return [side.median("ms", warm) for side in sides]


def main():
    parser = common_options(__doc__)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=[family.model_type for family in FAMILIES])
    options = parser.parse_args()
    families = [family for family in FAMILIES if options.only in (None, family.model_type)]
    beside = "a Llama of the same products"
    figures = Figures(options, [Figure(f"{family.model_type}: step time", "x", beside, at_most=TARGET) for family in families])
    for family in families:
        ours, llama = compare(options, family, options.rounds or (1 if options.smoke else 15))
        more = f"; it also has {family.reason}" if family.reason else ""
        print(f"{family.model_type}: {ours:.1f} against {llama:.1f} ms{more}", flush=True)
        figures.set(f"{family.model_type}: step time", ours / llama, f"{beside}, {llama:.0f} ms{more}")
    figures.finish()


if __name__ == "__main__":
    main()
