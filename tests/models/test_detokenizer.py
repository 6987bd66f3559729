"""Streamed pieces add up to the decoding of the whole, for every kind of tokenizer, in linear work."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Raw
from transformers import PreTrainedTokenizerFast

from kvcore.models.detokenizer import BROKEN
from kvcore.models.tokenizer import Tokenizer

MIXES = 3000 if os.environ.get("KVCORE_TEST_PROFILE") == "long" else 300  # of each kind
SPECIAL = ("<s>", "</s>", "<pad>")
WORDS = ("Hello", "▁wor", "ld", "▁", "▁▁", "é", "日本", "▁😀", ".", "'t", "▁do", "\n", "\ufffd", "a", "b")


def wrapped(raw: Raw) -> Tokenizer:
    raw.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    raw.add_tokens(["<tool>", "été", "a b", "日"])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    return Tokenizer(fast, ())


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["Ġthe", "Ã©", "ðŁĺ", "æĹ¥", "Ġ", "ĊĊ"]
    raw = Raw(models.BPE(vocab={t: i for i, t in enumerate([*alphabet, *pieces])}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    return wrapped(raw)


def nested_byte_level() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer._tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    return tokenizer


def byte_fallback(*more: Any) -> Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    vocab |= {w: len(vocab) + i for i, w in enumerate(WORDS)}
    raw = Raw(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])
    return wrapped(raw)


def llama() -> Tokenizer:
    return byte_fallback(decoders.Strip(" ", 1, 0))


def metaspace(scheme: str) -> Tokenizer:
    raw = Raw(models.Unigram([("<unk>", 0.0), *((w, -1.0) for w in WORDS)], unk_id=0))
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return wrapped(raw)


def word_piece(cleanup: bool) -> Tokenizer:
    words = ("[UNK]", "Hello", "##s", "##", ".", "don", "'", "##t", "do", "not", "n't", "日", ",")
    raw = Raw(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece(cleanup=cleanup)
    return wrapped(raw)


def suffix() -> Tokenizer:
    words = ("he", "llo</w>", "world</w>", ".</w>", "é</w>", "</w>")
    raw = Raw(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], end_of_word_suffix="</w>"))
    raw.normalizer, raw.decoder = normalizers.Lowercase(), decoders.BPEDecoder()
    return wrapped(raw)


def plain() -> Tokenizer:
    raw = Raw(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    return wrapped(raw)


KINDS = {
    "byte_level": byte_level,
    "nested_byte_level": nested_byte_level,
    "byte_fallback": byte_fallback,
    "llama": llama,
    "metaspace": lambda: metaspace("always"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_never": lambda: metaspace("never"),
    "word_piece": lambda: word_piece(True),
    "word_piece_raw": lambda: word_piece(False),
    "suffix": suffix,
    "no_decoder": plain,
}


@pytest.fixture(params=list(KINDS), scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def mixes(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Token ids as they come from a model that was told nothing: runs of one kind, borders, ids of no token."""
    size = len(tokenizer._tokenizer)
    ids: list[int] = []
    while len(ids) < rng.randint(1, 24):
        kind = rng.random()
        if kind < 0.4:
            ids += [rng.randrange(size) for _ in range(rng.randint(1, 4))]
        elif kind < 0.6:
            ids += [rng.randrange(size)] * rng.randint(1, 5)
        elif kind < 0.8:
            ids += tokenizer._tokenizer(rng.choice(["😀é", "日本語", "Hello world", "a b", "été <tool>"]))["input_ids"]
        else:
            ids.append(rng.choice([size + 3, *tokenizer.vocabulary.special]))
    return ids


def test_pieces_add_up_to_the_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    for _ in range(MIXES):
        ids = mixes(tokenizer, rng)
        ids = ids[: rng.randint(1, len(ids))]  # cut by max_tokens, perhaps in the middle of a character
        stream = tokenizer.detokenizer()
        pieces = []
        for token in ids:
            pieces.append(stream.push(token))
            shown = "".join(pieces)
            assert (shown + stream.rest()) == tokenizer.decode(ids[: len(pieces)])
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "llama"])
def test_half_a_character_is_never_shown(kind: str) -> None:
    tokenizer = KINDS[kind]()
    text = "né 日本語 😀😀."
    spelled = {"byte_level": _byte_signs, "byte_fallback": _byte_tokens, "llama": _byte_tokens}[kind]
    ids = tokenizer._tokenizer.convert_tokens_to_ids(spelled(text))
    stream = tokenizer.detokenizer()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == text
    assert not any(BROKEN in piece for piece in pieces)


def _byte_signs(text: str) -> list[str]:
    return [
        pieces for c in text for pieces in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(c)[0][0]
    ]


def _byte_tokens(text: str) -> list[str]:
    return [f"<0x{b:02X}>" for b in text.encode()]


class Counting:
    """Counts the ids that are decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], **keys: Any) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **keys)


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("byte_level", "</s>"),
        ("byte_level", "ð"),
        ("byte_level", "Ġthe"),
        ("nested_byte_level", "ð"),
        ("byte_fallback", "<0xF0>"),
        ("byte_fallback", "</s>"),
        ("llama", "▁"),
        ("llama", "\ufffd"),
        ("llama", "a"),
        ("word_piece", "##"),
        ("suffix", "</w>"),
        ("no_decoder", "b"),
    ],
)
def test_work_is_linear_whatever_a_token_shows(kind: str, token: str) -> None:
    tokenizer = KINDS[kind]()
    counting = Counting(tokenizer._tokenizer)
    token_id, work = counting.convert_tokens_to_ids(token), {}
    for count in (500, 1000, 2000):
        stream = Tokenizer(counting, ()).detokenizer()
        _ = stream._vocabulary.special
        counting.decoded = 0
        text = "".join(stream.push(token_id) for _ in range(count)) + stream.finish()
        work[count] = counting.decoded
        assert text == tokenizer.decode([token_id] * count)
    assert work[2000] <= 12 * 2000
    assert work[2000] <= 2.5 * work[1000] + 10


def test_the_librarys_own_stream_is_no_stream_of_the_whole() -> None:
    """Why `tokenizers.decoders.DecodeStream` does not serve: docs/decisions/engine.md."""
    tokenizer = byte_fallback()
    raw = tokenizer._tokenizer.backend_tokenizer
    ids = tokenizer._tokenizer.convert_tokens_to_ids(_byte_tokens("😀😃"))[:6]
    stream = decoders.DecodeStream(skip_special_tokens=True)
    shown = "".join(stream.step(raw, i) or "" for i in ids)
    assert shown.startswith("😀")
    assert tokenizer.decode(ids) == BROKEN * 6
