"""What `run` answers: `--prompt`, then the lines of `prompts=FILE`, else the samples kept under `conf/`."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.config.home import conf_dir, user_path
from kvcore.errors import ConfigError


def gather(texts: Sequence[str], file: str | None) -> list[str]:
    """The prompts in order.

    Raises:
        ConfigError: A prompt is empty, or the file is missing, not UTF-8 or without prompts.
    """
    if any(not text.strip() for text in texts):
        raise ConfigError("a prompt is empty", field="--prompt", got="", allowed="a text")
    for text in texts:
        if any("\ud800" <= c <= "\udfff" for c in text):  # bytes that the shell passed on as they were
            raise ConfigError("a prompt is not UTF-8", field="--prompt", got=ascii(text), allowed="a text in UTF-8")
    prompts = [*texts, *(_from_file(file) if file is not None else [])]
    return prompts or samples()


def _from_file(name: str) -> list[str]:
    path = user_path("prompts", name)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the file of prompts is not UTF-8", field="prompts", got=name, allowed="UTF-8, one prompt a line"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the file of prompts cannot be read: {error.strerror}",
            field="prompts",
            got=name,
            allowed="a UTF-8 file, one prompt a line",
        ) from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError("the file has no prompts", field="prompts", got=name, allowed="one prompt a line")
    return prompts


def samples() -> list[str]:
    """Six prompts of unlike lengths; the first two begin alike for more than three blocks of 16 tokens."""
    from omegaconf import OmegaConf

    content = OmegaConf.load(conf_dir() / "samples.yaml")
    return [str(prompt).format(common=content.common) for prompt in content.prompts]
