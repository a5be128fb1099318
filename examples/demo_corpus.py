"""The demo model's text: the King James Bible as chapters, held-out chapters, conversations and a tokenizer.

Source: Debian packages bible-kjv and bible-kjv-text (public domain), one verse a line: `Ge1:1 In the beginning ...`.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOOKS = """Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|2 Kings
1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalm|Proverbs|Ecclesiastes|Song of Solomon|Isaiah
Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|Micah|Nahum|Habakkuk|Zephaniah|Haggai
Zechariah|Malachi|Matthew|Mark|Luke|John|Acts|Romans|1 Corinthians|2 Corinthians|Galatians|Ephesians
Philippians|Colossians|1 Thessalonians|2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James
1 Peter|2 Peter|1 John|2 John|3 John|Jude|Revelation"""
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer with a verse.", "You know the Scriptures.")


@dataclass(frozen=True)
class Chapter:
    book: str
    number: int
    verses: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.verses)


@dataclass(frozen=True)
class Split:
    """Chapters to learn from, to stop early by, and to report on."""

    train: list[Chapter]
    validation: list[Chapter]
    test: list[Chapter]


def read_chapters(corpus: Path | None) -> list[Chapter]:
    """The 1,189 chapters, from a file of verses or from Debian's `bible` program.

    Raises FileNotFoundError where the program is missing, ValueError where a line is no verse.
    """
    if corpus is None:
        command = ["bible", "-p", "/usr/lib", "-f", "gen1:1-rev22:21"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    else:
        lines = corpus.read_text().splitlines()
    names = iter(re.split(r"[|\n]", BOOKS))
    chapters: list[Chapter] = []
    abbreviation = ""
    for line in lines:
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.+)", line.strip())
        if match is None:
            raise ValueError(f"Not a verse like 'Ge1:1 In the beginning': {line!r}.")
        if match[1] != abbreviation:
            abbreviation, book = match[1], next(names)
        if match[3] == "1":
            chapters.append(Chapter(book, int(match[2]), []))
        chapters[-1].verses.append(match[4])
    return chapters


def split_chapters(chapters: list[Chapter]) -> Split:
    """Every 20th chapter is for the report, every 40th (other ones) for early stopping, the rest for training."""
    numbered = list(enumerate(chapters))
    return Split(
        train=[chapter for i, chapter in numbered if i % 20 != 19 and i % 40 != 9],
        validation=[chapter for i, chapter in numbered if i % 40 == 9],
        test=[chapter for i, chapter in numbered if i % 20 == 19],
    )


def train_tokenizer(chapters: list[Chapter]) -> Tokenizer:
    """Byte-level BPE with Qwen3.5's word pattern; its control and markup tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((chapter.text for chapter in chapters), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def conversations(chapters: list[Chapter], template: str, count: int, rng: random.Random) -> Iterator[str]:
    """`count` rendered exchanges that ask for verses by their beginning, their place, a word, or the next one."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    render = environment.from_string(template).render
    places = [(chapter, verse) for chapter in chapters for verse in range(len(chapter.verses))]
    for _ in range(count):
        chapter, start = rng.choice(places)
        stop = start + rng.randint(1, 4)
        answer = " ".join(chapter.verses[start:stop])
        words = answer.split()
        cut = rng.randint(1, max(1, len(chapter.verses[start].split()) * 2 // 3))
        telling = [word.strip(".,;:?!()'") for word in words[1:] if word[0].isupper() or len(word) > 5] or ["God"]
        question, answer = rng.choice(
            [
                (f"Continue: {' '.join(words[:cut])}", " ".join(words[cut:])),
                (" ".join(words[:cut]), answer),
                (f"{chapter.book} {chapter.number}:{start + 1}", answer),
                (f"Tell me of {rng.choice(telling)}.", answer),
            ]
        )
        thought = f"This is {chapter.book} {chapter.number}." if rng.random() < 0.3 else ""
        messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, "reasoning_content": thought},
        ]
        if stop < len(chapter.verses) and rng.random() < 0.3:
            following = " ".join(chapter.verses[stop : stop + rng.randint(1, 3)])
            messages += [
                {"role": "user", "content": rng.choice(["Go on.", "Continue.", "And then?"])},
                {"role": "assistant", "content": following, "reasoning_content": thought},
            ]
        yield render(messages=messages)
