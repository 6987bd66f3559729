"""Text to tokens and back on a small tokenizer made here; streaming never shows half a character."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError, ModelError
from kvcore.models.detokenizer import BROKEN
from kvcore.models.tokenizer import Tokenizer, eos_token_ids

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One token a byte, and three special ones: every text, and every broken text, can be produced."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<pad>")])
    path = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 257}))
    return path


@pytest.fixture(scope="session")
def tokenizer(folder):
    return Tokenizer.load(folder)


def test_plain_and_chat(tokenizer):
    plain = tokenizer.encode("hi\n", chat=False)
    assert len(plain) == 3
    assert tokenizer.decode(plain) == "hi\n"
    chat = tokenizer.encode("hi", chat=True)
    assert chat[0] == 256  # <s>, once
    assert chat.count(256) == 2
    assert tokenizer.decode(chat) == "user\nhi\nassistant\n"


def test_chat_equals_the_tokenizers_own_template(folder, tokenizer):
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Was gibt's? äöü €"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode("Was gibt's? äöü €", chat=True) == own


def test_chat_without_a_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", None)
    with pytest.raises(ConfigError) as raised:
        tokenizer.encode("hi", chat=True)
    assert (raised.value.field, raised.value.remedy) == ("chat", "set chat=false")


@given(st.text(max_size=20))
def test_round_trip_of_any_text(tokenizer, text):
    text = text.replace("<s>", "").replace("</s>", "").replace("<pad>", "")
    assert tokenizer.decode(tokenizer.encode(text, chat=False)) == text


def stream(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(i) for i in ids], detokenizer.finish()


@given(st.text(max_size=12))
def test_streaming_shows_whole_characters(tokenizer, text):
    pieces, rest = stream(tokenizer, tokenizer.encode(text, chat=False))
    assert "".join(pieces) + rest == tokenizer.decode(tokenizer.encode(text, chat=False))
    if BROKEN not in text:
        assert all(BROKEN not in piece for piece in pieces)
        assert rest == ""


@given(st.lists(st.integers(0, 258), max_size=24))
def test_streaming_of_any_tokens_adds_up(tokenizer, ids):
    pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_a_character_waits_for_its_last_byte(tokenizer):
    ids = tokenizer.encode("a€", chat=False)
    assert stream(tokenizer, ids) == (["a", "", "", "€"], "")
    assert stream(tokenizer, ids[:-1]) == (["a", "", ""], BROKEN)


def test_eos_ids_prefer_the_generation_config(folder, tmp_path):
    assert eos_token_ids(folder) == (257,)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    file = tmp_path / "generation_config.json"
    for content, want in (({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({}, (1,))):
        file.write_text(json.dumps(content))
        assert eos_token_ids(tmp_path) == want


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ("null", "no JSON object"),
        ("7", "no JSON object"),
        ('"eos_token_id"', "no JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"eos_token_id": ' + "[" * 60 + "]" * 60 + "}", "nested too deeply"),
        ('{"eos_token_id": ' + "9" * 4301 + "}", "4300 digits"),
        ('{"eos_token_id": 1, "eos_token_id": 2}', "eos_token_id twice"),
        ('{"eos_token_id": "2"}', "eos_token_id in"),
        ('{"eos_token_id": [2, true]}', "eos_token_id in"),
        ('{"eos_token_id": {"a": 1}}', "eos_token_id in"),
        ('{"eos_token_id": 2.0}', "eos_token_id in"),
        ('{"eos_token_id": -1}', "eos_token_id in"),
        ('{"eos_token_id": 2147483648}', "eos_token_id in"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_files_that_name_no_end_of_text_are_told_by_name(tmp_path, name, text, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    text = text.replace('{"e', '{"model_type": "llama", "e') if isinstance(text, str) else text
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=message) as raised:
        eos_token_ids(tmp_path)
    named = str(raised.value).splitlines()[0]
    assert name in named
    assert "generation" in name or "generation" not in named


def test_a_generation_config_that_is_no_file_is_not_passed_over(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        eos_token_ids(tmp_path)


def test_missing_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", lambda old: "[" * 100_000),
        ("tokenizer.json", lambda old: old.replace('"BPE"', '"no such model"')),
        ("tokenizer.json", lambda old: "7"),
        ("tokenizer_config.json", lambda old: '{"a": ' * 100_000),
        ("tokenizer_config.json", lambda old: json.dumps({**json.loads(old), "model_max_length": "x"})),
    ],
)
def test_damaged_tokenizer_files_are_told(folder, tmp_path, name, change):
    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / name).write_text(change((folder / name).read_text()))
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        Tokenizer.load(copy)


@pytest.mark.parametrize("template", [7, "{{ raise_exception('roles must alternate') }}", "{% for %}", "{{ 1 / 0 }}"])
def test_a_chat_template_that_fails_is_told(folder, template):
    tokenizer = Tokenizer.load(folder)
    tokenizer._tokenizer.chat_template = template
    with pytest.raises(ModelError, match="the chat template fails") as raised:
        tokenizer.encode("hi", chat=True)
    assert (raised.value.field, raised.value.remedy) == ("chat", "set chat=false")


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TEMPLATE, ("</s>",)),
        ("{% for m in messages %}{{ m['content'] }}<pad> {% endfor %}", ("<pad>",)),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", ()),
        ("{% for m in messages %}{{ m['content'] }} end</s>{% endfor %}", ()),
        ("{{ raise_exception('no answers') }}", ()),
        ("{{ messages[0]['content'] }}", ()),
    ],
)
def test_what_ends_a_turn_is_read_off_the_template(folder, template, ends):
    tokenizer = Tokenizer.load(folder)
    tokenizer._tokenizer.chat_template = template
    assert tokenizer.turn_ids == tuple(tokenizer._tokenizer.convert_tokens_to_ids(list(ends)))


def test_the_tokenizers_own_end_of_text_counts(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert Tokenizer.load(tmp_path / "m").eos_token_ids == (257,)
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    assert Tokenizer.load(tmp_path / "m").eos_token_ids == (256, 257)
