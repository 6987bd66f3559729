"""Text comes out as soon as it is certain, and never past a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.output import TextStream


class Letters:
    """A tokenizer whose tokens are characters."""

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
