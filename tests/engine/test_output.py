"""Text comes out as soon as it is certain, and never past a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.output import TextStream


class Letters:
    """A tokenizer whose tokens are characters."""

    def special_text(self, token_id):
        return None

    def rest(self):
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
