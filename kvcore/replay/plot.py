"""The picture of a replay: hit rate, blocks by state, queue and waste along simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.replay.series import Sample

FORMATS = (".svg", ".png")
LEGEND = {"loc": "upper left", "bbox_to_anchor": (1, 1), "fontsize": "small", "frameon": False}
COLOURS = {"used": "#0072b2", "pending": "#e69f00", "reusable": "#56b4e9", "empty": "#e8e8e8"}  # told apart by all eyes


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before the replay.

    Raises:
        ConfigError: The ending is none of `FORMATS`, or matplotlib is not installed.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(
            "the ending of a picture's name tells its format, and this one is none",
            field="replay.plot",
            got=path.name,
            allowed=[f"NAME{ending}" for ending in FORMATS],
        )
    try:
        import matplotlib  # noqa: F401  (late: an extra)
    except ImportError as error:
        raise ConfigError(
            "a picture is drawn by matplotlib, which is not installed",
            field="replay.plot",
            got=path.name,
            remedy="pip install 'kvcore[plot]', or write the numbers alone: replay.series=NAME.csv",
        ) from error


def draw(samples: Sequence[Sample], path: Path, title: str) -> None:
    """Write the picture; equal samples give equal bytes.

    Raises:
        OSError: The file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    seconds = [s.seconds for s in samples]
    with matplotlib.rc_context({"svg.hashsalt": "kvcore", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 9), layout="constrained")
        hits, blocks, queue, waste = figure.subplots(4, 1, sharex=True)
        figure.suptitle(title)
        hits.plot(seconds, [100 * s.hit_rate if s.hit_rate is not None else float("nan") for s in samples], lw=1)
        totals = [100 * s.cached_tokens / s.prompt_tokens if s.prompt_tokens else float("nan") for s in samples]
        hits.plot(seconds, totals, lw=2)
        hits.legend(("since the last sample", "since the start"), **LEGEND)
        hits.set(ylabel="prompt tokens\nfrom the cache, %", ylim=(0, 100))
        rows = [[getattr(s, f"blocks_{state}") for s in samples] for state in COLOURS]
        blocks.stackplot(seconds, rows, labels=COLOURS, colors=COLOURS.values())
        blocks.legend(**LEGEND)
        blocks.set(ylabel="blocks", ylim=(0, None))
        queue.plot(seconds, [s.waiting for s in samples], lw=1, label="waiting")
        queue.plot(seconds, [s.running for s in samples], lw=1, label="running")
        queue.legend(**LEGEND)
        queue.set(ylabel="requests", ylim=(0, None))
        waste.plot(seconds, [100 * s.waste for s in samples], lw=1)
        waste.set(ylabel="slots in used blocks\nwithout a token, %", xlabel="simulated seconds", ylim=(0, None))
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata)
