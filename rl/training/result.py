"""Result of a training run, the listener it reports to, and the checksums of its checkpoints. No torch here."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pydantic import TypeAdapter, ValidationError

from rl.checksums import file_sum


class TrainingRefused(ValueError):
    """An expected refusal (no rows, nothing left after truncation, a run that cannot be resumed): data, not a bug."""


class TrainingFailed(RuntimeError):
    """Failure of a training that had started (the loss diverged, a full disk), with what was seen and what to try."""


class ResultError(ValueError):
    """A result file that is missing, cut off or of another kind; the message says what was expected and found."""


@dataclass
class TrainResult:
    """One run, whole: enough to report it, to draw it and to do it again."""

    method: str
    """`dpo`, `kto`, ..."""
    status: Literal["succeeded", "cancelled"]
    """`succeeded` or `cancelled` (stopped on request, with a checkpoint to resume from)."""
    checkpoint: str
    """Adapter directory: the final one, or the last checkpoint of a cancelled run."""
    base_model: str
    base_model_hash: str
    steps: int
    """Optimiser steps done, those before a resume included."""
    total_steps: int
    """Optimiser steps an uninterrupted run takes."""
    seconds: float
    """Wall time of this process's part of the run."""
    samples: dict[str, int] = field(default_factory=dict)
    """`train` and `eval`: pairs trained and evaluated on, after leaving out."""
    truncated: dict[str, int] = field(default_factory=dict)
    """`prompts`: pairs whose prompt lost its oldest tokens; `completions`: responses cut at the end."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> pairs given but not trained on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric; one that is no number (the chosen logits of a batch without a good response) is
    left out."""
    history: dict[str, list[float]] = field(default_factory=dict)
    """Metric -> its values; those of `step` and those starting with `eval_` (against `eval_step`) belong together."""
    recipe: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader should know."""
    details: list[str] = field(default_factory=list)
    """Sentences on how it was computed: forward strategy, compiled layers, caches."""
    preflight: dict[str, Any] = field(default_factory=dict)
    """`before` and `after`: looks at a few answers (`rl.training.preflight.AnswerCheck`); empty for free text."""
    stopped_early: str = ""
    """Reason why a run ended before its last step, by itself: it diverged, and its checkpoint is the last
    good one, or the eval split gained no more, and its checkpoint is the best one. Empty: it went to its
    end."""
    best_step: int = 0
    """The step whose weights were kept, by the eval split; 0: the last one's."""

    def __post_init__(self) -> None:
        self.metrics = {
            name: value for name, value in self.metrics.items() if value is not None and math.isfinite(value)
        }

    def save(self, path: str | Path) -> Path:
        """Write as JSON: whole, or not at all. Numbers JSON cannot hold (NaN, infinity) become null."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            half.write_text(
                json.dumps(_finite(dataclasses.asdict(self)), indent=2, ensure_ascii=False) + "\n", "utf-8"
            )
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Raises ResultError."""
        path = Path(path)
        try:
            body = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ResultError(
                f"expected a training result at {path}, found none ({error.strerror})"
            ) from error
        except ValueError as error:
            raise ResultError(
                f"expected a training result (JSON) at {path}, found other bytes: {error}; if its run was killed "
                "while writing, resume the run to write it again"
            ) from error
        if isinstance(body, dict):
            body = body | {"history": _with_gaps(body.get("history", {}))}
            if isinstance(metrics := body.get("metrics"), dict):
                body["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        try:
            return TypeAdapter(cls).validate_python(body)
        except ValidationError as invalid:
            fault = invalid.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "the file"
            raise ResultError(
                f"expected a training result at {path}, found another file: {where}: {fault['msg']}"
            ) from invalid

    def plot(self, path: str | Path) -> Path:
        """Draw loss, reward accuracy, margins and KL over the steps into one figure (PNG, SVG or PDF by its suffix)."""
        return _plot(self, Path(path))


def _with_gaps(history: object) -> object:
    """Curves with NaN where JSON has null."""
    if not isinstance(history, dict):
        return history
    curves = {name: values for name, values in history.items() if isinstance(values, list)}
    return history | {
        name: [math.nan if value is None else value for value in values] for name, values in curves.items()
    }


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


_INK, _FAINT, _TRAIN, _EVAL = "#1f2933", "#d9dfe5", "#2563a8", "#d9730d"

_PANELS = (
    ("loss", "Loss", "lower is better", None),
    ("rewards/accuracies", "Reward accuracy", "share of pairs; 0.5 is a coin", 0.5),
    ("rewards/margins", "Reward margin", "β × log-ratio, chosen minus rejected, nats", 0.0),
    ("log_ratio", "Log-ratio to the base", "mean per token of the data, nats; no distance", 0.0),
)

_KTO_PANELS = (
    *_PANELS[:3],
    ("kl", "Distance from the base", "KTO's reference point, nats", 0.0),
)

_PPO_PANELS = (
    ("reward", "Reward", "mean score of a step's responses", None),
    ("kl", "KL to the base", "nats per response (k3)", 0.0),
    ("loss", "Loss", "policy + vf_coef × value; hovers, does not fall", 0.0),
    ("explained_variance", "Explained variance", "1: the value foresees the returns; 0: a constant", 0.0),
)

_GRPO_PANELS = (
    *_PPO_PANELS[:2],
    ("loss", "Loss", "policy gradient + beta × KL; hovers, does not fall", 0.0),
    ("frac_reward_zero_std", "Groups that teach nothing", "share whose answers all earned the same", None),
)


_SFT_PANELS = (
    ("loss", "Loss", "lower is better", None),
    ("mean_token_accuracy", "Token accuracy", "share of tokens that are the first choice", None),
    ("rewards/demonstrations", "Reward", "log-ratio to the base per demonstration, nats", 0.0),
    ("log_ratio", "Log-ratio to the base", "mean per token of the demonstrations, nats", 0.0),
)

_SCORE_PANELS = (
    ("loss", "Loss", "lower is better", None),
    ("rewards/accuracies", "Accuracy", "share scored as people judged; 0.5 is a coin", 0.5),
    ("rewards/mean", "Reward", "mean score of a batch", None),
    ("rewards/std", "Spread", "standard deviation of a batch's scores", None),
)


def _panels(result: TrainResult) -> tuple[tuple[tuple[str, str, str, float | None], ...], str]:
    """The four curves to draw, and what the run's samples are called."""
    if result.method == "sft":
        return _SFT_PANELS, "demonstrations"
    if result.method == "reward_model":
        return _SCORE_PANELS, "rows"
    if result.method == "kto":
        return _KTO_PANELS, "pairs"
    if "reward" not in result.history:
        return _PANELS, "pairs"
    return (_PPO_PANELS if result.method == "ppo" else _GRPO_PANELS), "prompts"


def _plot(result: TrainResult, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    layout = ConstrainedLayoutEngine(w_pad=0.16, h_pad=0.14, wspace=0.04, hspace=0.05)
    figure = Figure(figsize=(10, 6.4), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    steps = result.history.get("step", [])
    eval_steps = result.history.get("eval_step", [])
    panels, rows = _panels(result)
    for axis, (metric, title, unit, neutral) in zip(axes.flat, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=16)
        axis.text(0, 1.02, unit, transform=axis.transAxes, fontsize=8.5, color="#66727f", va="bottom")
        if neutral is not None:
            axis.axhline(neutral, color="#9aa5b1", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        values = result.history.get(metric, [])
        if values and len(values) == len(steps):
            smooth = _smooth(values)
            alone = len(values) < 8
            axis.plot(
                steps,
                values,
                color=_TRAIN,
                linewidth=1.8 if alone else 1.0,
                alpha=1.0 if alone else 0.3,
                marker="o" if alone else None,
                markersize=3.5,
                zorder=2,
            )
            if not alone:
                axis.plot(steps, smooth, color=_TRAIN, linewidth=2.0, solid_capstyle="round", zorder=3)
            axis.annotate(
                f"{smooth[-1]:.3g}",
                (steps[-1], smooth[-1]),
                xytext=(5, 0),
                textcoords="offset points",
                fontsize=9,
                color=_TRAIN,
                va="center",
                fontweight="bold",
            )
        held_out = result.history.get(f"eval_{metric}", [])
        if held_out and len(held_out) == len(eval_steps):
            axis.plot(eval_steps, held_out, color=_EVAL, marker="D", markersize=5, linewidth=1.4, zorder=4)
        if not values and not held_out:
            axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color="#9aa5b1")
        if metric == "rewards/accuracies":
            axis.set_ylim(-0.02, 1.04)
        axis.grid(axis="y", color=_FAINT, linewidth=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(length=0, labelsize=8.5, labelcolor="#52606d")
        axis.margins(x=0.08)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        for side, spine in axis.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color("#9aa5b1")
    for axis in axes[1]:
        axis.set_xlabel("optimiser step", fontsize=9, color="#52606d")
    name = Path(result.base_model).name or result.base_model
    state = "" if result.status == "succeeded" else f" · {result.status} at step {result.steps}"
    figure.suptitle(
        f"{result.method.upper()} on {name} · {result.samples.get('train', 0):,} {rows} · "
        f"{result.steps:,} of {result.total_steps:,} steps · {_duration(result.seconds)}{state}",
        x=0.016,
        ha="left",
        fontsize=12.5,
        color=_INK,
    )
    if eval_steps:
        figure.text(
            0.988, 0.988, "◆ held out", color=_EVAL, ha="right", va="top", fontsize=9.5, fontweight="bold"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _smooth(values: list[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average without start-up bias (Adam's correction); gaps (NaN) keep the last value."""
    average, share, smooth = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            share = weight * share + (1 - weight)
        smooth.append(average / share if share else math.nan)
    return smooth


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


COMPLETE = "complete.json"
"""Written last into a checkpoint: file name -> [bytes, SHA-256]. Without it, or where one differs, it is not whole."""


class TrainListener(Protocol):
    """Listener of a run: a progress bar, a database row, a test. Called on rank 0 only."""

    def on_start(self, total_steps: int) -> None:
        """Before the first step, with the optimiser steps the whole run takes."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """A row of metrics, every `logging_steps`; keys starting with `eval_` come from the eval split."""

    def on_step(self, step: int, total: int) -> None:
        """After each optimiser step."""

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Report the phase that begins, in words ("loading the model"); or how far it is, where a total is known."""

    def on_note(self, text: str) -> None:
        """Something a person should know (truncation, a checkpoint skipped, 4-bit not available)."""

    def should_stop(self) -> bool:
        """True once a stop was requested: the run keeps a checkpoint and ends as `cancelled`."""

    def hold(self) -> None:
        """Put off stop requests: a step is being written into weights, optimizer and checkpoint."""

    def release(self) -> None:
        """Let stop requests interrupt again, anywhere. Raises KeyboardInterrupt for one that was put off."""


class Silent:
    """A TrainListener that listens to nothing and never stops."""

    def on_start(self, total_steps: int) -> None: ...

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None: ...

    def on_step(self, step: int, total: int) -> None: ...

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None: ...

    def on_note(self, text: str) -> None: ...

    def should_stop(self) -> bool:
        return False

    def hold(self) -> None: ...

    def release(self) -> None: ...


class Forwarding(Silent):
    """A TrainListener for a part of a run: requests to stop come from the run's own, and so do holds."""

    def __init__(self, listener: TrainListener) -> None:
        self.listener = listener

    def on_phase(self, name: str, done: int = 0, total: int = 0) -> None:
        self.listener.on_phase(name, done, total)

    def should_stop(self) -> bool:
        return self.listener.should_stop()

    def hold(self) -> None:
        self.listener.hold()

    def release(self) -> None:
        self.listener.release()


def checkpoint_seal(path: Path) -> None:
    """Note size and sum of every file, so that a copy cut off later, or a flipped byte, is noticed too."""
    sizes = {str(file.relative_to(path)): [file.stat().st_size, file_sum(file)] for file in _files(path)}
    half = path / f".{COMPLETE}.{os.getpid()}"
    half.write_text(json.dumps(sizes, indent=1), "utf-8")
    half.replace(path / COMPLETE)


def checkpoint_is_whole(path: Path) -> bool:
    """True if a sealed checkpoint still holds every file as it was; of one sealed by sizes alone, at its
    size."""
    try:
        sizes = json.loads((path / COMPLETE).read_text("utf-8"))
        return bool(sizes) and all(_is_as_sealed(path / name, sealed) for name, sealed in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _is_as_sealed(file: Path, sealed: int | list[object]) -> bool:
    size, digest = sealed if isinstance(sealed, list) else (sealed, None)
    return file.stat().st_size == size and (digest is None or file_sum(file) == digest)


def checkpoint_last(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint-<step> in `folder`, and a note on each newer, half-written one it removed."""
    found = sorted(
        (path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
        reverse=True,
    )
    notes: list[str] = []
    for path in found:
        if checkpoint_is_whole(path):
            return path, notes
        # left in place it would count as one of the checkpoints kept, and push a whole one out; every process of a
        # launch comes here, and one is enough to remove it
        shutil.rmtree(path, ignore_errors=True)
        notes.append(f"{path.name} was only half-written or is damaged, and is not used")
    return None, notes


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
