#include "launcher/built_in_models.h"

#include <array>
#include <nlohmann/json.hpp>

namespace lm {
namespace {

constexpr const char* kPhi3Window = R"({"sliding_window": 2047})";
constexpr const char* kGelu = R"({"hidden_act": "gelu_pytorch_tanh"})";
constexpr const char* kGemma3Window = R"({"sliding_window": 512})";
// Gemma 4: as several config.json of the published models in public repositories agree; the parameters are
// those of transformers' classes with these keys, of the text model alone. None of the files was loaded.
constexpr const char* kGemma4E2b =
    R"({"num_kv_shared_layers": 20, "use_double_wide_mlp": true, "layer_types": [
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 30.0})";
constexpr const char* kGemma4E4b = R"({"num_kv_shared_layers": 18, "final_logit_softcapping": 30.0})";
constexpr const char* kGemma4Of12b =
    R"({"attention_k_eq_v": true, "num_global_key_value_heads": 1, "sliding_window": 1024, "final_logit_softcapping": 30.0})";
constexpr const char* kGemma4Of31b =
    R"({"attention_k_eq_v": true, "num_global_key_value_heads": 4, "sliding_window": 1024, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0})";
constexpr const char* kGranite2b =
    R"({"embedding_multiplier": 12, "logits_scaling": 8, "residual_multiplier": 0.22, "attention_multiplier": 0.015625})";
constexpr const char* kGranite8b =
    R"({"embedding_multiplier": 12, "logits_scaling": 16, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125})";
constexpr const char* kGlm = R"({"attention_bias": true, "partial_rotary_factor": 0.5})";
constexpr const char* kStarcoder2 =
    R"({"hidden_act": "gelu_pytorch_tanh", "use_bias": true, "sliding_window": 4096, "attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1})";
constexpr const char* kGptOss20b =
    R"({"num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}})";
constexpr const char* kNemotron = R"({"hidden_act": "relu2", "partial_rotary_factor": 0.5})";

constexpr std::array kModels = {
    BuiltInModel{"HuggingFaceTB/SmolLM2-135M", &families::llama, 576, 1536, 30, 9, 3, 64, 49152, true, 100000,
                 8192, 134515008},
    BuiltInModel{"HuggingFaceTB/SmolLM2-360M", &families::llama, 960, 2560, 32, 15, 5, 64, 49152, true,
                 100000, 8192, 361821120},
    BuiltInModel{"HuggingFaceTB/SmolLM2-1.7B", &families::llama, 2048, 8192, 24, 32, 32, 64, 49152, true,
                 130000, 8192, 1711376384},
    BuiltInModel{"HuggingFaceTB/SmolLM3-3B", &families::smollm3, 2048, 11008, 36, 16, 4, 128, 128256, true,
                 5000000, 65536, 3075098624},
    BuiltInModel{"TinyLlama/TinyLlama-1.1B-Chat-v1.0", &families::llama, 2048, 5632, 22, 32, 4, 64, 32000,
                 false, 10000, 2048, 1100048384},
    BuiltInModel{"meta-llama/Llama-2-7b-hf", &families::llama, 4096, 11008, 32, 32, 32, 128, 32000, false,
                 10000, 4096, 6738415616},
    BuiltInModel{"meta-llama/Llama-2-13b-hf", &families::llama, 5120, 13824, 40, 40, 40, 128, 32000, false,
                 10000, 4096, 13015864320},
    BuiltInModel{"meta-llama/Llama-2-70b-hf", &families::llama, 8192, 28672, 80, 64, 8, 128, 32000, false,
                 10000, 4096, 68976648192},
    BuiltInModel{"meta-llama/Meta-Llama-3-8B", &families::llama, 4096, 14336, 32, 32, 8, 128, 128256, false,
                 500000, 8192, 8030261248},
    BuiltInModel{"meta-llama/Meta-Llama-3-70B", &families::llama, 8192, 28672, 80, 64, 8, 128, 128256, false,
                 500000, 8192, 70553706496},
    BuiltInModel{"meta-llama/Llama-3.1-8B", &families::llama, 4096, 14336, 32, 32, 8, 128, 128256, false,
                 500000, 131072, 8030261248},
    BuiltInModel{"meta-llama/Llama-3.1-70B", &families::llama, 8192, 28672, 80, 64, 8, 128, 128256, false,
                 500000, 131072, 70553706496},
    BuiltInModel{"meta-llama/Llama-3.1-405B", &families::llama, 16384, 53248, 126, 128, 8, 128, 128256, false,
                 500000, 131072, 405853388800},
    BuiltInModel{"meta-llama/Llama-3.2-1B", &families::llama, 2048, 8192, 16, 32, 8, 64, 128256, true, 500000,
                 131072, 1235814400},
    BuiltInModel{"meta-llama/Llama-3.2-3B", &families::llama, 3072, 8192, 28, 24, 8, 128, 128256, true,
                 500000, 131072, 3212749824},
    BuiltInModel{"meta-llama/Llama-3.3-70B", &families::llama, 8192, 28672, 80, 64, 8, 128, 128256, false,
                 500000, 131072, 70553706496},
    BuiltInModel{"codellama/CodeLlama-7b-hf", &families::llama, 4096, 11008, 32, 32, 32, 128, 32016, false,
                 1000000, 16384, 6738546688},
    BuiltInModel{"codellama/CodeLlama-13b-hf", &families::llama, 5120, 13824, 40, 40, 40, 128, 32016, false,
                 1000000, 16384, 13016028160},
    BuiltInModel{"codellama/CodeLlama-34b-hf", &families::llama, 8192, 22016, 48, 64, 8, 128, 32000, false,
                 1000000, 16384, 33743970304},
    BuiltInModel{"Qwen/Qwen2-0.5B", &families::qwen2, 896, 4864, 24, 14, 2, 64, 151936, true, 1000000, 131072,
                 494032768},
    BuiltInModel{"Qwen/Qwen2-1.5B", &families::qwen2, 1536, 8960, 28, 12, 2, 128, 151936, true, 1000000,
                 131072, 1543714304},
    BuiltInModel{"Qwen/Qwen2-7B", &families::qwen2, 3584, 18944, 28, 28, 4, 128, 152064, false, 1000000,
                 131072, 7615616512},
    BuiltInModel{"Qwen/Qwen2-72B", &families::qwen2, 8192, 29568, 80, 64, 8, 128, 152064, false, 1000000,
                 131072, 72706203648},
    BuiltInModel{"Qwen/Qwen2.5-0.5B", &families::qwen2, 896, 4864, 24, 14, 2, 64, 151936, true, 1000000,
                 32768, 494032768},
    BuiltInModel{"Qwen/Qwen2.5-1.5B", &families::qwen2, 1536, 8960, 28, 12, 2, 128, 151936, true, 1000000,
                 131072, 1543714304},
    BuiltInModel{"Qwen/Qwen2.5-3B", &families::qwen2, 2048, 11008, 36, 16, 2, 128, 151936, true, 1000000,
                 32768, 3085938688},
    BuiltInModel{"Qwen/Qwen2.5-7B", &families::qwen2, 3584, 18944, 28, 28, 4, 128, 152064, false, 1000000,
                 131072, 7615616512},
    BuiltInModel{"Qwen/Qwen2.5-14B", &families::qwen2, 5120, 13824, 48, 40, 8, 128, 152064, false, 1000000,
                 131072, 14770033664},
    BuiltInModel{"Qwen/Qwen2.5-32B", &families::qwen2, 5120, 27648, 64, 40, 8, 128, 152064, false, 1000000,
                 131072, 32763876352},
    BuiltInModel{"Qwen/Qwen2.5-72B", &families::qwen2, 8192, 29568, 80, 64, 8, 128, 152064, false, 1000000,
                 131072, 72706203648},
    BuiltInModel{"Qwen/Qwen2.5-Coder-1.5B", &families::qwen2, 1536, 8960, 28, 12, 2, 128, 151936, true,
                 1000000, 32768, 1543714304},
    BuiltInModel{"Qwen/Qwen2.5-Coder-7B", &families::qwen2, 3584, 18944, 28, 28, 4, 128, 152064, false,
                 1000000, 32768, 7615616512},
    BuiltInModel{"Qwen/Qwen2.5-Coder-14B", &families::qwen2, 5120, 13824, 48, 40, 8, 128, 152064, false,
                 1000000, 32768, 14770033664},
    BuiltInModel{"Qwen/Qwen2.5-Coder-32B", &families::qwen2, 5120, 27648, 64, 40, 8, 128, 152064, false,
                 1000000, 32768, 32763876352},
    BuiltInModel{"Qwen/Qwen2.5-Math-1.5B", &families::qwen2, 1536, 8960, 28, 12, 2, 128, 151936, true, 10000,
                 4096, 1543714304},
    BuiltInModel{"Qwen/Qwen2.5-Math-7B", &families::qwen2, 3584, 18944, 28, 28, 4, 128, 152064, false, 10000,
                 4096, 7615616512},
    BuiltInModel{"Qwen/Qwen3-0.6B", &families::qwen3, 1024, 3072, 28, 16, 8, 128, 151936, true, 1000000,
                 40960, 596049920},
    BuiltInModel{"Qwen/Qwen3-1.7B", &families::qwen3, 2048, 6144, 28, 16, 8, 128, 151936, true, 1000000,
                 40960, 1720574976},
    BuiltInModel{"Qwen/Qwen3-4B", &families::qwen3, 2560, 9728, 36, 32, 8, 128, 151936, true, 1000000, 40960,
                 4022468096},
    BuiltInModel{"Qwen/Qwen3-4B-Instruct-2507", &families::qwen3, 2560, 9728, 36, 32, 8, 128, 151936, true,
                 5000000, 262144, 4022468096},
    BuiltInModel{"Qwen/Qwen3-8B", &families::qwen3, 4096, 12288, 36, 32, 8, 128, 151936, false, 1000000,
                 40960, 8190735360},
    BuiltInModel{"Qwen/Qwen3-14B", &families::qwen3, 5120, 17408, 40, 40, 8, 128, 151936, false, 1000000,
                 40960, 14768307200},
    BuiltInModel{"Qwen/Qwen3-32B", &families::qwen3, 5120, 25600, 64, 64, 8, 128, 151936, false, 1000000,
                 40960, 32762123264},
    BuiltInModel{"Qwen/Qwen3-30B-A3B", &families::qwen3_moe, 2048, 6144, 48, 32, 4, 128, 151936, false,
                 1000000, 40960, 30532122624, R"({"norm_topk_prob": true})"},
    BuiltInModel{"openai/gpt-oss-20b", &families::gpt_oss, 2880, 2880, 24, 64, 8, 64, 201088, false, 150000,
                 131072, 20914757184, kGptOss20b},
    BuiltInModel{"mistralai/Mistral-7B-v0.1", &families::mistral, 4096, 14336, 32, 32, 8, 128, 32000, false,
                 10000, 32768, 7241732096},
    BuiltInModel{"mistralai/Mistral-7B-v0.3", &families::mistral, 4096, 14336, 32, 32, 8, 128, 32768, false,
                 1000000, 32768, 7248023552},
    BuiltInModel{"mistralai/Ministral-8B-Instruct-2410", &families::mistral, 4096, 12288, 36, 32, 8, 128,
                 131072, false, 100000000, 32768, 8019808256},
    BuiltInModel{"mistralai/Mistral-Nemo-Base-2407", &families::mistral, 5120, 14336, 40, 32, 8, 128, 131072,
                 false, 1000000, 128000, 12247782400},
    BuiltInModel{"mistralai/Mistral-Small-24B-Base-2501", &families::mistral, 5120, 32768, 40, 32, 8, 128,
                 131072, false, 100000000, 32768, 23572403200},
    BuiltInModel{"mistralai/Mistral-Small-Instruct-2409", &families::mistral, 6144, 16384, 56, 48, 8, 128,
                 32768, false, 1000000, 32768, 22247282688},
    BuiltInModel{"mistralai/Mistral-Large-Instruct-2407", &families::mistral, 12288, 28672, 88, 96, 8, 128,
                 32768, false, 1000000, 131072, 122610069504},
    BuiltInModel{"HuggingFaceH4/zephyr-7b-beta", &families::mistral, 4096, 14336, 32, 32, 8, 128, 32000,
                 false, 10000, 32768, 7241732096},
    BuiltInModel{"deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", &families::qwen2, 1536, 8960, 28, 12, 2, 128,
                 151936, false, 10000, 131072, 1777088000},
    BuiltInModel{"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", &families::qwen2, 3584, 18944, 28, 28, 4, 128,
                 152064, false, 10000, 131072, 7615616512},
    BuiltInModel{"deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", &families::qwen2, 5120, 13824, 48, 40, 8, 128,
                 152064, false, 1000000, 131072, 14770033664},
    BuiltInModel{"deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", &families::qwen2, 5120, 27648, 64, 40, 8, 128,
                 152064, false, 1000000, 131072, 32763876352},
    BuiltInModel{"deepseek-ai/DeepSeek-R1-Distill-Llama-8B", &families::llama, 4096, 14336, 32, 32, 8, 128,
                 128256, false, 500000, 131072, 8030261248},
    BuiltInModel{"deepseek-ai/DeepSeek-R1-Distill-Llama-70B", &families::llama, 8192, 28672, 80, 64, 8, 128,
                 128256, false, 500000, 131072, 70553706496},
    BuiltInModel{"deepseek-ai/deepseek-coder-1.3b-base", &families::llama, 2048, 5504, 24, 16, 16, 128, 32256,
                 false, 100000, 16384, 1346471936},
    BuiltInModel{"deepseek-ai/deepseek-coder-6.7b-base", &families::llama, 4096, 11008, 32, 32, 32, 128,
                 32256, false, 100000, 16384, 6740512768},
    BuiltInModel{"deepseek-ai/deepseek-coder-33b-base", &families::llama, 7168, 19200, 62, 56, 8, 128, 32256,
                 false, 100000, 16384, 33342991360},
    BuiltInModel{"deepseek-ai/deepseek-llm-7b-base", &families::llama, 4096, 11008, 30, 32, 32, 128, 102400,
                 false, 10000, 4096, 6910365696},
    BuiltInModel{"01-ai/Yi-1.5-6B", &families::llama, 4096, 11008, 32, 32, 4, 128, 64000, false, 5000000,
                 4096, 6061035520},
    BuiltInModel{"01-ai/Yi-1.5-9B", &families::llama, 4096, 11008, 48, 32, 4, 128, 64000, false, 5000000,
                 4096, 8829407232},
    BuiltInModel{"01-ai/Yi-1.5-34B", &families::llama, 7168, 20480, 60, 56, 8, 128, 64000, false, 5000000,
                 4096, 34388917248},
    BuiltInModel{"tiiuae/Falcon3-1B-Base", &families::llama, 2048, 8192, 18, 8, 4, 256, 131072, false,
                 1000042, 4096, 1669408768},
    BuiltInModel{"tiiuae/Falcon3-3B-Base", &families::llama, 3072, 9216, 22, 12, 4, 256, 131072, false,
                 1000042, 32768, 3227655168},
    BuiltInModel{"tiiuae/Falcon3-7B-Base", &families::llama, 3072, 23040, 28, 12, 4, 256, 131072, false,
                 1000042, 32768, 7455550464},
    BuiltInModel{"tiiuae/Falcon3-10B-Base", &families::llama, 3072, 23040, 40, 12, 4, 256, 131072, false,
                 1000042, 32768, 10305653760},
    BuiltInModel{"upstage/SOLAR-10.7B-v1.0", &families::llama, 4096, 14336, 48, 32, 8, 128, 32000, false,
                 10000, 4096, 10731524096},
    BuiltInModel{"microsoft/Phi-3-mini-4k-instruct", &families::phi3, 3072, 8192, 32, 32, 32, 96, 32064,
                 false, 10000, 4096, 3821079552, kPhi3Window},
    BuiltInModel{"microsoft/Phi-3-mini-128k-instruct", &families::phi3, 3072, 8192, 32, 32, 32, 96, 32064,
                 false, 10000, 131072, 3821079552},
    BuiltInModel{"microsoft/Phi-3.5-mini-instruct", &families::phi3, 3072, 8192, 32, 32, 32, 96, 32064, false,
                 10000, 131072, 3821079552},
    BuiltInModel{"microsoft/Phi-3-medium-4k-instruct", &families::phi3, 5120, 17920, 40, 40, 10, 128, 32064,
                 false, 10000, 4096, 13960238080, kPhi3Window},
    BuiltInModel{"microsoft/phi-4", &families::phi3, 5120, 17920, 40, 40, 10, 128, 100352, false, 250000,
                 16384, 14659507200},
    BuiltInModel{"microsoft/Phi-4-mini-instruct", &families::phi3, 3072, 8192, 32, 24, 8, 128, 200064, true,
                 10000, 131072, 3836021760, R"({"partial_rotary_factor": 0.75})"},
    BuiltInModel{"google/gemma-2b", &families::gemma, 2048, 16384, 18, 8, 1, 256, 256000, true, 10000, 8192,
                 2506172416, kGelu},
    BuiltInModel{"google/gemma-7b", &families::gemma, 3072, 24576, 28, 16, 16, 256, 256000, true, 10000, 8192,
                 8537680896, kGelu},
    BuiltInModel{"google/gemma-2-2b", &families::gemma2, 2304, 9216, 26, 8, 4, 256, 256000, true, 10000, 8192,
                 2614341888},
    BuiltInModel{"google/gemma-2-9b", &families::gemma2, 3584, 14336, 42, 16, 8, 256, 256000, true, 10000,
                 8192, 9241705984},
    BuiltInModel{"google/gemma-2-27b", &families::gemma2, 4608, 36864, 46, 32, 16, 128, 256000, true, 10000,
                 8192, 27227128320, R"({"query_pre_attn_scalar": 144})"},
    BuiltInModel{"google/gemma-3-270m", &families::gemma3_text, 640, 2048, 18, 4, 1, 256, 262144, true,
                 1000000, 32768, 268098176, kGemma3Window},
    BuiltInModel{"google/gemma-3-1b-pt", &families::gemma3_text, 1152, 6912, 26, 4, 1, 256, 262144, true,
                 1000000, 32768, 999885952, kGemma3Window},
    BuiltInModel{"google/gemma-4-E2B", &families::gemma4_text, 1536, 6144, 35, 8, 1, 256, 262144, true,
                 1000000, 131072, 4628569344, kGemma4E2b},
    BuiltInModel{"google/gemma-4-E4B", &families::gemma4_text, 2560, 10240, 42, 8, 2, 256, 262144, true,
                 1000000, 131072, 7463013376, kGemma4E4b},
    BuiltInModel{"google/gemma-4-12B", &families::gemma4_unified_text, 3840, 15360, 48, 16, 8, 256, 262144,
                 true, 1000000, 262144, 11907350272, kGemma4Of12b},
    BuiltInModel{"google/gemma-4-31B", &families::gemma4_text, 5376, 21504, 60, 32, 16, 256, 262144, true,
                 1000000, 262144, 30697345280, kGemma4Of31b},
    BuiltInModel{"ibm-granite/granite-3.1-2b-base", &families::granite, 2048, 8192, 40, 32, 8, 64, 49155,
                 true, 5000000, 131072, 2533531648, kGranite2b},
    BuiltInModel{"ibm-granite/granite-3.1-8b-base", &families::granite, 4096, 12800, 40, 32, 8, 128, 49155,
                 true, 10000000, 131072, 8170848256, kGranite8b},
    BuiltInModel{"ibm-granite/granite-3.3-2b-base", &families::granite, 2048, 8192, 40, 32, 8, 64, 49159,
                 true, 10000000, 131072, 2533539840, kGranite2b},
    BuiltInModel{"ibm-granite/granite-3.3-8b-base", &families::granite, 4096, 12800, 40, 32, 8, 128, 49159,
                 true, 10000000, 131072, 8170864640, kGranite8b},
    BuiltInModel{"allenai/OLMo-2-0425-1B", &families::olmo2, 2048, 8192, 16, 16, 16, 128, 100352, false,
                 500000, 4096, 1484916736},
    BuiltInModel{"allenai/OLMo-2-1124-7B", &families::olmo2, 4096, 11008, 32, 32, 32, 128, 100352, false,
                 500000, 4096, 7298617344},
    BuiltInModel{"allenai/OLMo-2-1124-13B", &families::olmo2, 5120, 13824, 40, 40, 40, 128, 100352, false,
                 500000, 4096, 13716198400},
    BuiltInModel{"allenai/OLMo-2-0325-32B", &families::olmo2, 5120, 27648, 64, 40, 8, 128, 100352, false,
                 500000, 4096, 32234279936},
    BuiltInModel{"zai-org/glm-4-9b-chat-hf", &families::glm, 4096, 13696, 40, 32, 2, 128, 151552, false,
                 10000, 131072, 9399951360, kGlm},
    BuiltInModel{"zai-org/GLM-4-9B-0414", &families::glm4, 4096, 13696, 40, 32, 2, 128, 151552, false, 10000,
                 32768, 9400279040, kGlm},
    BuiltInModel{"openai-community/gpt2", &families::gpt2, 768, 3072, 12, 12, 12, 64, 50257, true, 0, 1024,
                 124439808},
    BuiltInModel{"openai-community/gpt2-medium", &families::gpt2, 1024, 4096, 24, 16, 16, 64, 50257, true, 0,
                 1024, 354823168},
    BuiltInModel{"openai-community/gpt2-large", &families::gpt2, 1280, 5120, 36, 20, 20, 64, 50257, true, 0,
                 1024, 774030080},
    BuiltInModel{"openai-community/gpt2-xl", &families::gpt2, 1600, 6400, 48, 25, 25, 64, 50257, true, 0,
                 1024, 1557611200},
    BuiltInModel{"bigcode/starcoder2-3b", &families::starcoder2, 3072, 12288, 30, 24, 2, 128, 49152, true,
                 1000000, 16384, 3030371328, kStarcoder2},
    BuiltInModel{"bigcode/starcoder2-7b", &families::starcoder2, 4608, 18432, 32, 36, 4, 128, 49152, true,
                 1000000, 16384, 7173923840, kStarcoder2},
    BuiltInModel{"bigcode/starcoder2-15b", &families::starcoder2, 6144, 24576, 40, 48, 4, 128, 49152, false,
                 100000, 16384, 15957889024, kStarcoder2},
    BuiltInModel{"CohereLabs/c4ai-command-r7b-12-2024", &families::cohere2, 4096, 14336, 32, 32, 8, 128,
                 256000, true, 50000, 131072, 8028033024, R"({"logit_scale": 0.25})"},
    BuiltInModel{"CohereLabs/c4ai-command-a-03-2025", &families::cohere2, 12288, 36864, 64, 96, 8, 128,
                 256000, true, 50000, 131072, 111057580032, R"({"logit_scale": 0.25})"},
    BuiltInModel{"nvidia/Nemotron-Mini-4B-Instruct", &families::nemotron, 3072, 9216, 32, 24, 8, 128, 256000,
                 false, 10000, 4096, 4190509056, kNemotron},
    BuiltInModel{"nvidia/Minitron-4B-Base", &families::nemotron, 3072, 9216, 32, 24, 8, 128, 256000, false,
                 10000, 4096, 4190509056, kNemotron},
};

// GPT-2 has its own words for the same numbers.
nlohmann::ordered_json keys_of_gpt2(const BuiltInModel& m) {
  return {{"n_embd", m.hidden},           {"n_inner", m.ffn},
          {"n_layer", m.layers},          {"n_head", m.heads},
          {"vocab_size", m.vocab},        {"n_positions", m.positions},
          {"tie_word_embeddings", m.tied}};
}

nlohmann::ordered_json common_keys(const BuiltInModel& m) {
  return {{"hidden_size", m.hidden},
          {"intermediate_size", m.ffn},
          {"num_hidden_layers", m.layers},
          {"num_attention_heads", m.heads},
          {"num_key_value_heads", m.kv_heads},
          {"head_dim", m.head_dim},
          {"vocab_size", m.vocab},
          {"tie_word_embeddings", m.tied},
          {"rope_theta", m.rope_theta},
          {"max_position_embeddings", m.positions},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-5}};
}

std::string config_json(const BuiltInModel& m) {
  nlohmann::ordered_json json{{"architectures", {m.family->architecture}},
                              {"model_type", m.family->model_type}};
  json.update(m.family == &families::gpt2 ? keys_of_gpt2(m) : common_keys(m));
  if (m.family == &families::mistral)
    json["sliding_window"] = nullptr;  // its configuration class assumes one
  if (m.more != nullptr) json.update(nlohmann::ordered_json::parse(m.more));
  return json.dump();
}

}  // namespace

std::span<const BuiltInModel> built_in_models() {
  return kModels;
}

const std::vector<ModelShape>& model_shapes() {
  static const std::vector<ModelShape> kShapes = [] {
    std::vector<ModelShape> out;
    for (const BuiltInModel& model : kModels) out.push_back({model.name, config_json(model)});
    return out;
  }();
  return kShapes;
}

}  // namespace lm
