"""Reads the command line, runs a command once or once a job, prints, and turns errors into exit statuses."""

from __future__ import annotations

import difflib
import gc
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from kvcore.cli import help_text
from kvcore.cli.commands import NAMES, Command
from kvcore.cli.commands import command as load
from kvcore.cli.result import BAD_INPUT, BUG, DONE, Flags, Job, Result, to_json
from kvcore.config.sources import Files
from kvcore.errors import ConfigError, KVCoreError

VALUED = {"--prompt": "TEXT", "--config": "FILE.yaml", "--config-dir": "DIR"}


def run_main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    # Before torch is loaded. Threads that spin for a core that others use made the sample run five times
    # slower on a busy machine (67 s instead of 13 s on two cores); waiting costs nothing on a quiet one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Start-up makes objects by the hundred thousand that all stay: looking through them is a tenth of a short command.
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = _wants_json(words)
    try:
        with _logs_to_stderr():
            return _dispatch(words, as_json)
    except KVCoreError as error:
        _print_error(error, as_json)
        return BAD_INPUT
    except BrokenPipeError:
        # The reader of our output went away; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        print("kvcore: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _report_bug(error, as_json)


def _dispatch(words: list[str], as_json: bool) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text.program())
        return DONE
    if words[0] == "--version":
        import kvcore

        print(f"kvcore {kvcore.__version__}")
        return DONE
    if words[0] == "--completion":
        from kvcore.cli import completion

        print(completion.answer(words[1:]))
        return DONE
    command = _command(words[0])
    flags = _flags(command, words[1:])
    if flags.help:
        from kvcore.registry.loader import installed

        print(help_text.command(command, installed(), Files(flags.config, tuple(flags.dirs)).folders()))
        return DONE
    # Whatever a library prints goes to standard error: standard output carries our answer alone.
    with redirect_stdout(sys.stderr):
        overrides = command.rewrite(flags.overrides)
        result = _jobs(command, flags, overrides) if flags.multirun else _job(command, flags, overrides)
    _print(to_json(result.document) if as_json else result.text)
    return result.status


def _command(name: str) -> Command:
    if name in NAMES:
        return load(name)
    near = difflib.get_close_matches(name, NAMES, n=2)
    raise ConfigError(
        f"there is no command {name}",
        field="COMMAND",
        got=name,
        allowed=NAMES,
        remedy=f"did you mean {' or '.join(near)}?" if near else "`kvcore --help` lists the commands",
    )


def _flags(command: Command, words: Sequence[str]) -> Flags:
    flags, rest = Flags(), iter(words)
    for word in rest:
        name, equals, text = word.partition("=")
        if word in ("-h", "--help"):
            flags.help = True
        elif word in ("-m", "--multirun"):
            flags.multirun = True
        elif word == "--cfg":
            flags.composed = True
        elif name in VALUED or word == "-":
            value = "-" if word == "-" else text if equals else next(rest, None)
            if value is None:
                raise ConfigError(f"{name} needs {VALUED[name]}", field=name, allowed=f"{name} {VALUED[name]}")
            _take(command, flags, "--prompt" if word == "-" else name, value)
        elif word.startswith("-"):
            raise ConfigError(
                "unknown option",
                field=word,
                got=word,
                allowed=["-m", "--cfg", "--help", *(f"{n} {v}" for n, v in VALUED.items())],
                remedy="settings are written KEY=VALUE, without dashes",
            )
        else:
            flags.overrides.append(word)
    return flags


def _take(command: Command, flags: Flags, name: str, value: str) -> None:
    if name == "--config-dir":
        flags.dirs.append(value)
    elif name == "--config":
        if flags.config is not None:
            raise ConfigError("--config is given twice", field=name, got=[flags.config, value], allowed="one file")
        flags.config = value
    elif command.prompts:
        flags.prompts.append(sys.stdin.read().removesuffix("\n") if value == "-" else value)
    else:
        raise ConfigError(f"{command.name} takes no prompts", field=name, got=value, allowed="with run and diff")


def _job(command: Command, flags: Flags, overrides: Sequence[str]) -> Result:
    from kvcore.config.compose import compose
    from kvcore.registry.loader import installed

    registry = installed()
    composed = compose(overrides, registry, command.root, Files(flags.config, tuple(flags.dirs)))
    if flags.composed:
        return help_text.configuration(composed, registry)
    return command.execute(Job(composed, registry, tuple(flags.prompts)))


def _jobs(command: Command, flags: Flags, swept: Sequence[str]) -> Result:
    """One job for each combination of values; a job that fails does not stop the others."""
    from kvcore.config.sweep import expand

    rows, texts, worst = [], [], DONE
    for overrides in expand(swept):
        try:
            result = _job(command, flags, overrides)
        except KVCoreError as error:
            result = Result(error.as_dict(), f"kvcore: {_one_line(error)}", BAD_INPUT)
        except Exception as error:
            text = _bug_text(error)
            result = Result(_bug_document(text), text, BUG)
        rows.append({"overrides": overrides, "status": result.status, "result": result.document})
        texts.append(f"=== {' '.join(overrides)}\n{result.text}")
        worst = max(worst, result.status)
    more: dict[str, Any] = {}
    if command.summarize is not None:
        more, text = command.summarize(rows)
        texts.append(text)
    return Result({"jobs": rows, **more}, "\n\n".join(texts), worst)


def _wants_json(words: Sequence[str]) -> bool:
    """Known before anything is parsed, so that a parse error is printed in the form asked for."""
    asked, text = [], False
    for word in words:
        if word.startswith("output=") and not text:
            asked.append(word.partition("=")[2].strip("'\""))
        text = word == "--prompt"  # the next word is a prompt, whatever it looks like
    return bool(asked) and asked[-1] == "json"


def _print(text: str) -> None:
    """To standard output: an answer is not lost to a locale."""
    try:
        print(_printable(text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the answer cannot be written: {error.strerror}", field="standard output", got=error.errno
        ) from error


def _printable(text: str, stream: TextIO) -> str:
    """The text with whatever the stream's encoding lacks spelled out."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _print_error(error: KVCoreError, as_json: bool) -> None:
    if as_json:
        _print(to_json(error.as_dict()))
    print(_printable(f"kvcore: {_one_line(error)}", sys.stderr), file=sys.stderr)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _report_bug(error: Exception, as_json: bool) -> int:
    text = _bug_text(error)
    if as_json:
        _print(to_json(_bug_document(text)))
    print(_printable(text, sys.stderr), file=sys.stderr)
    return BUG


def _bug_text(error: Exception) -> str:
    if os.environ.get("KVCORE_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    told = _one_line(error)
    return f"kvcore: this is a bug of kvcore ({told}); KVCORE_DEBUG=1 shows where, `kvcore env` what to report"


def _bug_document(text: str) -> dict[str, object]:
    error = {"type": "Bug", "message": text, "field": None, "got": None, "allowed": None}
    return {"error": {**error, "remedy": "report it with the output of `kvcore env`"}}


@contextmanager
def _logs_to_stderr() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("kvcore: %(levelname)s: %(message)s"))
    logger = logging.getLogger("kvcore")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
