"""The tokenizer of the built-in `tiny` model: bytes, and the tokens of a chat. Nothing is downloaded."""

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

PAD, OPEN, CLOSE = "<|pad|>", "<|im_start|>", "<|im_end|>"

TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] or '' -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0 to 255 are the bytes of UTF-8, with a chat template.

    Any text survives encoding and decoding. 256 pads, 257 opens a turn, 258 closes one and ends a text.
    """
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, OPEN, CLOSE])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=CLOSE,
        extra_special_tokens=[OPEN],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def _characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies.

    Bytes that print stand for themselves; the others are numbered from 256 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    characters, spare = [], 256
    for byte in range(256):
        characters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return characters
