"""Text comes out as soon as it is certain, and never past a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.test_detokenizer import KINDS, Counting

from kvcore.engine.output import TextStream
from kvcore.models.detokenizer import BROKEN
from kvcore.models.tokenizer import Tokenizer


class Letters:
    """A tokenizer whose tokens are characters."""

    def special_text(self, token_id):
        return None

    def peek(self):
        return ""

    def detokenizer(self):
        return self

    def push(self, token_id):
        return chr(token_id)

    def finish(self):
        return ""


def feed(text, stop):
    stream, pieces = TextStream(Letters(), stop), []
    for letter in text:
        pieces.append(stream.push(ord(letter)))
        if stream.stopped:
            break
    else:
        pieces.append(stream.finish())
    return stream, pieces


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_text_is_cut_before_the_first_stop_string_to_complete(text, stop):
    want, stopped = text, False
    for end in range(1, len(text) + 1):
        found = [text[:end].find(s) for s in stop if s in text[:end]]
        if found:
            want, stopped = text[: min(found)], True
            break
    stream, pieces = feed(text, stop)
    assert "".join(pieces) == stream.text == want
    assert stream.stopped == stopped


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(Letters(), ("END",))
    assert [stream.push(ord(c)) for c in "xENxE"] == ["x", "", "", "ENx", ""]
    assert stream.finish() == "E"


def test_without_stop_strings_nothing_is_held():
    assert feed("abc", ())[1] == ["a", "b", "c", ""]


class Tags(Letters):
    """Letters, and tokens below 10 that are special: shown as nothing, spelled <0> to <9>."""

    def special_text(self, token_id):
        return f"<{token_id}>" if token_id < 10 else None

    def push(self, token_id):
        return "" if token_id < 10 else chr(token_id)


def spelled(tokens):
    return "".join(f"<{t}>" if t < 10 else chr(t) for t in tokens)


def run(tokens, stop, **keys):
    stream, pieces = TextStream(Tags(), stop, **keys), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    else:
        pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return stream


tags = st.lists(st.sampled_from([1, 2, ord("a"), ord("b"), ord("<")]), max_size=14)
stops = st.lists(st.sampled_from(["<1>", "a<1>", "<1>b", "<1><2>", "ab", "a", "<2>a<1>", "<"]), max_size=2)


@given(tags, stops)
def test_stop_strings_can_name_special_tokens(tokens, stop):
    """Against the definition: after each token, the text shown and the text spelled out are searched from the start."""
    want, stopped = "".join(chr(t) for t in tokens if t >= 10), False
    for end in range(1, len(tokens) + 1):
        head = tokens[:end]
        shown, whole = "".join(chr(t) for t in head if t >= 10), spelled(head)
        cuts = [shown.find(s) for s in stop if s in shown]
        for s in stop:
            if s in whole:
                cuts.append(len("".join(chr(t) for t in _until(head, whole.find(s)) if t >= 10)))
        if cuts:
            want, stopped = shown[: min(cuts)], True
            break
    stream = run(tokens, stop)
    assert (stream.text, stream.stopped) == (want, stopped)
    assert stream.stop_reason in ([*stop] if stopped else [None])


def _until(tokens, place):
    """The tokens whose spelling begins before a place."""
    found, at = [], 0
    for token in tokens:
        if at >= place:
            break
        found.append(token)
        at += len(spelled([token]))
    return found


def test_the_text_of_the_first_tokens_is_out_of_reach():
    assert run([ord(c) for c in "aXbXc"], ("X",)).text == "a"
    assert run([ord(c) for c in "aXbXc"], ("X",), min_tokens=2).text == "aXb"
    assert run([1, ord("a"), 1], ("<1>",), min_tokens=1).text == "a"


def test_special_tokens_without_end_are_forgotten():
    stream = TextStream(Tags(), ("<2>x",))
    for _ in range(1000):
        stream.push(1)
    assert len(stream._specials) <= 1


@pytest.mark.parametrize("kind", ["byte_fallback", "llama"])
@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        (["a", "<0xC3>", "<0xA9>", "</s>"], "é</s>", "a"),
        (["a", "<0xC3>", "<0xA9>", "</s>"], "</s>", "aé"),
        (["a", "<0xC3>", "<0xA9>", "</s>", "b"], "a</s>", None),
        (["a", "<0xC3>", "<0xA9>", "</s>", "b"], "é</s>b", "a"),
        (["a", "<0xC3>", "<0xA9>", "</s>", "b"], "</s>é", None),
        (["a", "<0xC3>", "<0xA9>", "</s>", "b"], "</s>b", "aé"),
        (["a", "<0xC3>", "</s>", "<0xA9>", "</s>"], "é</s>", "a"),  # the first stands within the character
        (["a", "<0xC3>", "</s>", "<0xA9>", "<pad>", "b"], "<pad>b", "aé"),
        (["a", "<0xC3>", "</s>", "<0xC3>", "</s>"], f"{BROKEN}</s>{BROKEN}</s>", "a"),
        (["<0xF0>", "<0x9F>", "<0x98>", "</s>", "<0x80>", "<pad>", "a"], "<pad>a", "😀"),
        (["<0xF0>", "<0x9F>", "<0x98>", "</s>", "<0x80>", "<pad>", "a"], "a</s>", None),
        (["<0xF0>"] * 400 + ["</s>"] * 300, "</s>" * 290, BROKEN * 400),  # what waits is decoded once
        (["<0xF0>"] * 40 + ["</s>"] * 3, "</s></s></s>", BROKEN * 40),
        (["</s>", "<0xC3>", "<0xA9>", "</s>", "<0xC3>", "<pad>", "<pad>"], "<pad><pad>", BROKEN * 3),
    ],
)
def test_bytes_that_wait_stand_before_a_special_token(kind, tokens, stop, text):
    tokenizer = KINDS[kind]()
    ids = tokenizer._tokenizer.convert_tokens_to_ids(tokens)
    stream = TextStream(tokenizer, (stop,))
    pieces = [stream.push(i) for i in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    assert (stream.text, stream.stopped) == ((tokenizer.decode(ids), False) if text is None else (text, True))


@pytest.mark.parametrize("kind", ["byte_level", "nested_byte_level", "byte_fallback", "llama"])
@pytest.mark.parametrize("stop", ["STOP", "x</s>", "<", "</s></s>x"])
@pytest.mark.parametrize("pattern", ["block", "turn", "turns"])
def test_work_is_linear_with_special_tokens_and_stop_strings(kind, stop, pattern):
    counting = Counting(KINDS[kind]()._tokenizer)
    byte, end = counting.convert_tokens_to_ids(["ð" if "level" in kind else "<0xF0>", "</s>"])
    work = {}
    for count in (500, 1000, 2000):
        tokenizer = Tokenizer(counting, ())
        stream = TextStream(tokenizer, (stop,))
        tokenizer.special_text(end)
        counting.decoded = 0
        half, many = [byte] * (count // 2), [end] * (count // 2)
        for i in {"block": half + many, "turn": [byte, end] * (count // 2), "turns": many + half + many}[pattern]:
            stream.push(i)
            assert len(stream._specials) <= len(stop)
        stream.finish()
        work[count] = counting.decoded
    assert work[2000] <= 12 * 2000
    assert work[2000] <= 2.5 * work[1000] + 600


def test_nothing_is_matched_across_a_special_token_whose_place_is_not_known():
    tokenizer = KINDS["byte_fallback"]()
    stream = TextStream(tokenizer, (f"</s>{BROKEN}a",))
    byte, end, pad, a = tokenizer._tokenizer.convert_tokens_to_ids(["<0xC3>", "</s>", "<pad>", "a"])
    stream.push(byte)
    stream.push(end)
    stream.push(byte)
    stream._detokenizer._allowance = -100
    stream.push(pad)
    assert (stream.push(a), stream.stopped) == (BROKEN * 2 + "a", False)


@pytest.mark.parametrize("name", ["<pad>", "<s>"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_that_is_not_the_end_of_text_stops(kind, name):
    """As reported: a stop text such as `<|im_start|>`, which decoding never shows."""
    tokenizer = KINDS[kind]()
    ids = tokenizer._tokenizer.convert_tokens_to_ids(["</s>", name])
    word = next(i for i in range(len(tokenizer._tokenizer)) if tokenizer.decode([i]).strip() and i not in ids)
    stream = TextStream(tokenizer, (name,))
    text = "".join(stream.push(i) for i in [word, ids[0], word, ids[1], word]) + stream.finish()
    assert (text, stream.stopped, stream.stop_reason) == (tokenizer.decode([word, word]), True, name)
