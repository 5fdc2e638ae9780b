"""A byte-level tokenizer for small test models: token b is byte b, so any UTF-8 text round-trips.

| ids | tokens |
| --- | --- |
| 0 .. 255 | the bytes |
| 256 .. 261 | <|bos|> <|eos|> <|pad|> <|system|> <|user|> <|assistant|>, special |
| 262 .. vocab - 1 | "<262>" ...: never produced from text, but a random model may emit them, and they must decode |

No token is added to a prompt by itself; the chat template writes <|bos|>.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS, EOS, PAD = 256, 257, 258
MIN_VOCAB = 256 + len(SPECIALS)

# A tool's schema and results are read as system text: the model is random, only the token stream has to be right.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}{{- '<|system|>' + (tools | tojson) + eos_token -}}{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer', 'tool') -%}{%- set tag = '<|system|>' -%}
{%- elif message['role'] == 'user' -%}{%- set tag = '<|user|>' -%}
{%- elif message['role'] == 'assistant' -%}{%- set tag = '<|assistant|>' -%}
{%- else -%}{{- raise_exception('unknown role ' + message['role']) -}}
{%- endif -%}
{{- tag + (message['content'] or '') + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def byte_tokenizer(vocab: int, max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer with exactly `vocab` tokens, of which 262 are needed; ValueError when there are fewer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab < MIN_VOCAB:
        raise ValueError(
            f"byte_tokenizer: vocab must be at least {MIN_VOCAB} (256 bytes and the specials), got {vocab}"
        )
    ids = {character: byte for byte, character in enumerate(_byte_characters())}
    ids |= {token: 256 + i for i, token in enumerate(SPECIALS)}
    ids |= {f"<{i}>": i for i in range(MIN_VOCAB, vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    # Without the split regex the whole text is one word, so spaces are ordinary bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[1],
        pad_token=SPECIALS[2],
        extra_special_tokens=list(SPECIALS[3:]),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _byte_characters() -> list[str]:
    """The character the byte-level pre-tokenizer writes for each byte 0 .. 255."""
    from tokenizers import pre_tokenizers

    # The alphabet's order is unspecified; the map is fixed: printable Latin-1 bytes stand for themselves, the others
    # follow from U+0100 on, in byte order.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    characters, moved = [], 0
    for byte in range(256):
        if chr(byte) in alphabet:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + moved))
            moved += 1
    return characters
