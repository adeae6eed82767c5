"""Chat templates in the styles that checkpoints have, written for these tests."""

from __future__ import annotations

# Content is a string and nothing else.
STRINGS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# A list is written as Python writes it.
DUMPS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
# LLaVA's: pictures first, and a string vanishes without a word.
PICTURES_FIRST = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Qwen's: strings and parts, pictures counted on demand, keys as good as types.
COUNTED = (
    "{% set count = namespace(value=0) %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{% set count.value = count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ count.value }}: {% endif %}<image>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Only a key tells that there is a picture.
KEYED = COUNTED.replace("part['type'] == 'image' or ", "")
# Gemma's: roles alternate, the system's words go into the first question.
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% if messages[0]['content'] is string %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% else %}"
    "{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}"
    "{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ first if loop.first else '' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Calls of tools and their results.
TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}"
    "{% for call in message.tool_calls %}CALL {{ call.function.name }} "
    "{{ call.function.arguments | tojson }} {{ message.content is none }}\n{% endfor %}"
    "{% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
)
