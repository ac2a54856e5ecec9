"""Small tokenizers and chat templates in the shapes of known model families, for prepare_test.py."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
          "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
          "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function | tojson }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Drops what earlier turns thought, and shows an empty thought in the last one.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is defined else '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

MISTRAL = ("{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
           "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
           "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
           "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
           "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}")

GENERATION = ("{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
              "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}INSIDE{% endgeneration %}OUTSIDE"
              "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}")
GENERATION_IN = GENERATION.replace("INSIDE", "{{ '<|im_end|>' }}").replace("OUTSIDE", "")
GENERATION_OUT = GENERATION.replace("INSIDE", "").replace("OUTSIDE", "{{ '<|im_end|>' }}")
# The same through a macro, inside which the place of the output is unknown.
GENERATION_MACRO = ("{% macro turn(message) %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
                    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
                    "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endmacro %}"
                    "{% for message in messages %}{{ turn(message) }}{% endfor %}"
                    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

TEXT = ["hello world, what is it? I am fine: <b>5 & 7</b> ünïcode 日本語 \U0001f600 system user assistant tool",
        "The quick brown fox jumps over the lazy dog. 0123456789 {\"a\": [1, 2]} \n\n"]


def byte_level(special, bos=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT * 4, trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    return tokenizer


def sentence_piece():
    """Blanks as ▁, a prefix blank, bytes for what is unknown, BOS in front: as Llama 2 and Mistral have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator([t[:60] for t in TEXT] * 4, trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))
    whole = json.loads(tokenizer.to_str())
    for byte in range(256):
        whole["model"]["vocab"][f"<0x{byte:02X}>"] = len(whole["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                             special_tokens=[("<s>", 1)])
    return tokenizer


IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
L3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MODELS = {  # tokenizer, config, template
    "chatml": (lambda: byte_level(IM), {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, CHATML),
    "llama3": (lambda: byte_level(L3, L3[0]), {"bos_token": {"__type": "AddedToken", "content": L3[0]},
                                               "eos_token": "<|eot_id|>"}, LLAMA3),
    "qwen": (lambda: byte_level(IM), {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}, QWEN),
    "mistral": (sentence_piece, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, MISTRAL),
    "generation_in": (lambda: byte_level(IM), {"eos_token": "<|im_end|>"}, GENERATION_IN),
    "generation_out": (lambda: byte_level(IM), {"eos_token": "<|im_end|>"}, GENERATION_OUT),
    "generation_macro": (lambda: byte_level(IM), {"eos_token": "<|im_end|>"}, GENERATION_MACRO),
    "plain": (lambda: byte_level(["<s>", "</s>"], "<s>"), {"bos_token": "<s>", "eos_token": "</s>"}, None),
}
