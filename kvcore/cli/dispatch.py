"""Reads the command line, runs a command once or once a job, prints, and turns errors into exit statuses."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import TextIO

from kvcore.cli import help_text
from kvcore.cli.commands import COMMANDS, Command
from kvcore.cli.result import BAD_INPUT, BUG, DONE, Flags, Job, Result, to_json
from kvcore.errors import ConfigError, KVCoreError, NotBuiltError


def run_main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    # Before torch is loaded. Threads that spin for a core that others use made the sample run five times
    # slower on a busy machine (67 s instead of 13 s on two cores); waiting costs nothing on a quiet one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
    command = _command(words[0])
    flags = _flags(command, words[1:])
    if flags.help:
        from kvcore.registry.loader import installed

        print(help_text.command(command, installed()))
        return DONE
    # Whatever a library prints goes to standard error: standard output carries our answer alone.
    with redirect_stdout(sys.stderr):
        result = _jobs(command, flags) if flags.multirun else _job(command, flags.overrides, flags.prompts)
    _print(to_json(result.document) if as_json else result.text)
    return result.status


def _command(name: str) -> Command:
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=2)
        raise ConfigError(
            f"there is no command {name}",
            field="COMMAND",
            got=name,
            allowed=[c.name for c in COMMANDS.values() if c.built],
            remedy=f"did you mean {' or '.join(near)}?" if near else "`kvcore --help` lists the commands",
        )
    if not command.built:
        raise NotBuiltError(
            f"the command {name} is not built yet",
            field="COMMAND",
            got=name,
            allowed=[c.name for c in COMMANDS.values() if c.built],
            remedy="`kvcore plan` says how much fits; `kvcore run prompts=FILE` runs the prompts themselves",
        )
    return command


def _flags(command: Command, words: Sequence[str]) -> Flags:
    flags, rest = Flags(), iter(words)
    stdin: Callable[[], str] = lambda: sys.stdin.read().removesuffix("\n")  # noqa: E731
    for word in rest:
        if word in ("-h", "--help"):
            flags.help = True
        elif word in ("-m", "--multirun"):
            flags.multirun = True
        elif word == "--prompt" or word.startswith("--prompt=") or word == "-":
            if command.name not in ("run", "diff"):
                raise ConfigError(
                    f"{command.name} takes no prompts", field="--prompt", got=word, allowed="with run and diff"
                )
            text = "-" if word == "-" else word.partition("=")[2] if "=" in word else next(rest, None)
            if text is None:
                raise ConfigError("--prompt needs a text", field="--prompt", allowed="--prompt TEXT")
            flags.prompts.append(stdin() if text == "-" else text)
        elif word.startswith("-"):
            raise ConfigError(
                "unknown option",
                field=word,
                got=word,
                allowed=["--prompt TEXT (run)", "-m", "--help"],
                remedy="settings are written KEY=VALUE, without dashes",
            )
        else:
            flags.overrides.append(word)
    return flags


def _job(command: Command, overrides: Sequence[str], prompts: Sequence[str]) -> Result:
    from kvcore.config.compose import compose
    from kvcore.registry.loader import installed

    registry = installed()
    module = import_module(command.module)
    execute: Callable[[Job], Result] = module.execute
    names: tuple[str, ...] = ()
    if command.name == "conform":
        # One run over several backends: here alone a comma list needs no -m.
        names, overrides = module.take_backends(overrides)
    elif command.name == "diff":
        overrides = module.quoted(overrides)
    return execute(Job(compose(overrides, registry), registry, tuple(prompts), names))


def _jobs(command: Command, flags: Flags) -> Result:
    """One job for each combination of values; a job that fails does not stop the others."""
    from kvcore.config.sweep import expand

    rows, texts, worst = [], [], DONE
    for overrides in expand(flags.overrides):
        try:
            result = _job(command, overrides, flags.prompts)
        except KVCoreError as error:
            result = Result(error.as_dict(), f"kvcore: {_one_line(error)}", BAD_INPUT)
        except Exception as error:
            text = _bug_text(error)
            result = Result(_bug_document(text), text, BUG)
        rows.append({"overrides": overrides, "status": result.status, "result": result.document})
        texts.append(f"=== {' '.join(overrides)}\n{result.text}")
        worst = max(worst, result.status)
    return Result({"jobs": rows}, "\n\n".join(texts), worst)


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
