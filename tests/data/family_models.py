"""Chat templates in the structure of the families' published ones, with small tokenizers, for family_templates_test.py."""

from prepare_models import byte_level

GEMMA = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
         "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
         "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
         "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
         "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")

# The text of a system message stands in front of the first user's.
GEMMA3 = ("{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
          "{%- set first = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text']) + '\n\n' -%}"
          "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
          "{%- for message in rest -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
          "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
          "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
          "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
          "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
          "{%- else -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}"
          "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}")

# What is not continued ends with the tokenizer's end token, too: a conversation is no prefix of a longer one.
PHI3 = ("{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}")
PHI4_MINI = PHI3.replace("|>\n'", "|>'")

PHI4 = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}")

GRANITE = ("{%- for message in messages %}{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}"
           "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}")

# No turn has an end: the next one's first token is where generation stops.
GLM4 = ("[gMASK]<sop>{% for message in messages %}{{ '<|observation|>' if message.role == 'tool' else '<|' + message.role + '|>' }}"
        "{{ '\n' + (message.content or '') }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")

COHERE2 = ("{{ bos_token }}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
           "{{ {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[message.role] }}"
           "{{ message.content + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}")

OLMO2 = ("{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
         "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
         "{% if add_generation_prompt %}{{ '\n<|assistant|>\n' }}{% endif %}")

DEEPSEEK = ("{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
            "{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
            "{% else %}{{ '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}")

MINIMAX = ("{% for message in messages %}{% if loop.first %}{{ ']~!b[' }}{% endif %}"
           "{{ ']~b]' + ('ai' if message.role == 'assistant' else message.role) + '\n' + message.content + '[e~[\n' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ ']~b]ai\n' }}{% endif %}")

# name -> (special tokens, the first of which the tokenizer writes before text if `writes`, tokenizer_config.json, template, what ends an
# answer inside a conversation and at its end, whether it has a system role)
STYLES = {
    "gemma": (["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"], True, {"bos_token": "<bos>", "eos_token": "<eos>"}, GEMMA,
              "<end_of_turn>", "<end_of_turn>", False),
    "gemma3": (["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"], True, {"bos_token": "<bos>", "eos_token": "<eos>"}, GEMMA3,
               "<end_of_turn>", "<end_of_turn>", True),
    "phi3": (["<|endoftext|>", "<|assistant|>", "<|end|>", "<|system|>", "<|user|>"], False, {"eos_token": "<|endoftext|>"}, PHI3,
             "<|end|>", "<|end|>\n<|endoftext|>", True),
    "phi4_mini": (["<|endoftext|>", "<|assistant|>", "<|end|>", "<|system|>", "<|user|>"], False, {"eos_token": "<|endoftext|>"}, PHI4_MINI,
                  "<|end|>", "<|end|><|endoftext|>", True),
    "phi4": (["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"], False, {"eos_token": "<|im_end|>"}, PHI4,
             "<|im_end|>", "<|im_end|>", True),
    "granite": (["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"], False,
                {"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>"}, GRANITE, "<|end_of_text|>", "<|end_of_text|>", True),
    "glm4": (["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"], False,
             {"eos_token": "<|endoftext|>"}, GLM4, "<|user|>", "<|user|>", True),
    "cohere2": (["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
                 "<EOS_TOKEN>"], True, {"bos_token": "<BOS_TOKEN>", "eos_token": "<EOS_TOKEN>"}, COHERE2,
                "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", True),
    "olmo2": (["<|endoftext|>"], False, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, OLMO2,
              "<|endoftext|>", "<|endoftext|>", True),
    "deepseek": (["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"], True, {"bos_token": "<｜begin▁of▁sentence｜>"},
                 DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", True),
    "minimax": (["]~!b[", "]~b]", "[e~["], False, {"bos_token": "]~!b["}, MINIMAX, "[e~[", "[e~[", True),
}


def tokenizer_of(style):
    special, writes, *_ = STYLES[style]
    return byte_level(special, special[0] if writes else None)
