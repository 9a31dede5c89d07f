"""Figures of training runs as charts: the leading one, the others in families, and all of them as tables.

One run, or several on the same charts. A figure that was logged once is a number, not a chart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from rl.charts.lines import (
    LEADING_HEIGHT,
    SLOTS,
    LineChart,
    LineData,
    Points,
    finite_points,
    line_chart,
    number_text,
)

Series = Mapping[str, Points]
"""Logged figure -> its points; prefix `eval_`: on the eval split."""

HELD_OUT = "eval_"
ROWS_OF_A_LINE = 10
"""Most steps of each line in a table, including the first and the last."""
LOGARITHMIC = {"loss"}
"""Figures on a logarithmic scale where they span much: a loss of 1e-4 beside one of 0.4."""
LEADING = ("reward", "loss")
"""The first of these that a run has leads: rewards of its own answers (the losses of PPO and GRPO do not show them),
else the loss."""
BESIDE = {"rejected": "chosen"}
"""Parts drawn on one chart for a single run: `logps/rejected` beside `logps/chosen`."""
TITLES_BESIDE = {
    "rewards/chosen": (
        "Rewards, chosen and rejected",
        "beta × log-ratio to the reference; chosen above rejected",
    ),
    "logps/chosen": (
        "Log-probability, chosen and rejected",
        "nats per answer; both may fall, the gap should grow",
    ),
    "logits/chosen": ("Mean logit, chosen and rejected", "of the answers' tokens"),
}
"""Titles of charts with both parts."""

COUNTERS = {"step", "epoch", "total_flos"}
"""Figures that only count and are not drawn."""

OVERFIT_RATIO, OVERFIT_GAP = 3.0, 0.2
"""A held-out loss this many times the training loss, and this much above it, counts as overfit."""

TITLES = {
    "loss": ("Loss", "should fall, then level off; a rising held-out loss means overfitting"),
    "rewards/accuracies": ("Reward accuracy", "share of pairs whose chosen answer it prefers"),
    "rewards/margins": ("Reward margin", "how far apart chosen and rejected are; should grow"),
    "rewards/chosen": ("Reward of chosen", "beta × log-ratio to the reference"),
    "rewards/rejected": ("Reward of rejected", "beta × log-ratio to the reference"),
    "rewards/demonstrations": ("Reward of demonstrations", "log-ratio to the base, nats"),
    "rewards/mean": ("Mean score", "of a batch"),
    "rewards/std": ("Spread of scores", "standard deviation of a batch"),
    "reward": ("Reward", "mean reward of its sampled answers; should grow"),
    "reward_std": ("Spread of rewards", "0: all answers to a prompt have the same reward, nothing to learn"),
    "reward_less_kl": ("Reward less KL penalty", "what PPO maximises"),
    "frac_reward_zero_std": (
        "Groups that teach nothing",
        "share of groups whose answers all have the same reward",
    ),
    "logps/chosen": ("Log-probability of chosen", "nats per answer"),
    "logps/rejected": ("Log-probability of rejected", "nats per answer"),
    "logits/chosen": ("Mean logit of chosen", "of the answers' tokens"),
    "logits/rejected": ("Mean logit of rejected", "of the answers' tokens"),
    "kl": ("KL to the reference", "how far its answers moved from the start, in nats; never below 0"),
    "log_ratio": (
        "Log-ratio to the base model",
        "nats per token of the data; below 0: less likely than by the base",
    ),
    "entropy": ("Entropy", "entropy of the predictions, nats per token; near 0 it repeats itself"),
    "sampled_entropy": ("Entropy of samples", "nats per token of its own answers"),
    "mean_token_accuracy": ("Token accuracy", "share of tokens that are its first choice"),
    "clip_fraction": ("Clip fraction", "share of updates held back"),
    "explained_variance": ("Explained variance", "how well the value head predicts rewards; 1 is best"),
    "learning_rate": ("Learning rate", "size of a step: up, then down to 0"),
    "grad_norm": ("Gradient norm", "before clipping; peaks are hard batches"),
    "tokens_per_second": ("Tokens per second", "speed of training"),
    "kl_coef": ("KL coefficient", "weight of the penalty for moving away"),
    "seconds_sampling": ("Sampling", "seconds a step"),
    "seconds_judging": ("Judging", "seconds a step"),
    "seconds_learning": ("Learning", "seconds a step"),
    "num_tokens": ("Tokens learnt from", "so far"),
    "runtime": ("Time of an evaluation", "seconds"),
    "samples_per_second": ("Samples per second", "speed of evaluations"),
    "steps_per_second": ("Batches per second", "speed of evaluations"),
    "ranking_loss": ("Ranking loss", "error of P(chosen above rejected); lower is better"),
    "tokens": ("Tokens per answer", "length of its own answers"),
    "ended": ("Answers that ended", "share that stopped by themselves"),
    "valid": ("Valid answers", "share the agent can act on"),
}
"""Figure -> its title and how to read it."""

SHARES = {
    "rewards/accuracies",
    "clip_fraction",
    "frac_reward_zero_std",
    "mean_token_accuracy",
    "ended",
    "valid",
}
"""Figures drawn on a scale from 0 to 1."""

FAMILIES = (
    ("rewards", "Rewards", r"rewards?(/.*|_.*)?$|frac_reward_zero_std$|(mean_)?advantages?"),
    (
        "distance",
        "Log-probabilities and distance from the base",
        r"log(p|it)s/|log_ratio$|kl$|(sampled_)?entropy$|mean_token_accuracy$|ranking_loss$",
    ),
    ("answers", "Answers", r"completions/|tools/|tokens$|ended$|valid$|repetition$"),
    (
        "updates",
        "Policy updates",
        r"clip|.*_clip_ratio|explained_variance$|value|return$|(.*_)?loss$|kl_coef$|sampling/|entropy_coef$",
    ),
    ("optimiser", "Learning rate and gradient norm", r"learning_rate$|grad_norm$|weight_decay$"),
    (
        "speed",
        "Speed and memory",
        r"seconds_|.*_per_second$|.*runtime$|.*memory|num_tokens$|.*_s$|.*_ms$|optimiser_steps$",
    ),
)
"""Slug, title and pattern of a family's figures, in display order; the rest is "Other figures"."""


@dataclass(frozen=True)
class FigureTable:
    """The numbers of some charts: a column per line, a row per step."""

    columns: list[str]
    rows: list[tuple[int, list[str]]]


@dataclass(frozen=True)
class LoneFigure:
    """A figure that was logged once."""

    title: str
    text: str
    step: int


@dataclass(frozen=True)
class FigureFamily:
    """Charts of one kind of figure, their numbers, and figures that were logged once."""

    slug: str
    title: str
    charts: list[LineChart] = field(default_factory=list)
    lone: list[LoneFigure] = field(default_factory=list)
    table: FigureTable | None = None


@dataclass(frozen=True)
class RunCharts:
    """All figures of one run or several; `main_family` holds the large chart, None without any figure."""

    main_family: FigureFamily | None
    families: list[FigureFamily]


def overfit_words(series: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Warning for a run whose held-out loss is far above its training loss; else empty."""
    if not series.get("loss") or not series.get("eval_loss"):
        return ""
    loss, held_out = series["loss"][-1][1], series["eval_loss"][-1][1]
    if held_out < OVERFIT_RATIO * loss or held_out - loss < OVERFIT_GAP:
        return ""
    return (
        f"Overfit: the loss is {loss:.2g} on the training rows and {held_out:.2g} on held-out rows. It has learnt its "
        "rows by heart. Train fewer steps or rate more, and judge the policy by its answers to held-out prompts."
    )


def run_charts(series: Series) -> RunCharts:
    """Charts of one run: training beside held out, chosen beside rejected."""
    return _charts([("", series)])


def runs_charts(runs: Sequence[tuple[str, Series]]) -> RunCharts:
    """Charts of several (label, figures), at most SLOTS runs with a colour each, held out dashed."""
    if len(runs) > SLOTS:
        raise ValueError(
            f"expected at most {SLOTS} runs, which is how many colours there are; found {len(runs)}"
        )
    return _charts(runs)


def _charts(runs: Sequence[tuple[str, Series]]) -> RunCharts:
    names = {
        name.removeprefix(HELD_OUT) for _, series in runs for name in series if finite_points(series[name])
    }
    leads = next((name for name in LEADING if name in names), None)
    groups: dict[str, list[str]] = {slug: [] for slug in (*(slug for slug, _, _ in FAMILIES), "other")}
    for name in sorted(names, key=_place):
        if name != leads and name not in COUNTERS:
            groups[family_of(name)].append(name)
    titles = {slug: title for slug, title, _ in FAMILIES} | {"other": "Other figures"}
    return RunCharts(
        main_family=_family("leading", TITLES[leads][0], [leads], runs) if leads else None,
        families=[_family(slug, titles[slug], members, runs) for slug, members in groups.items() if members],
    )


def family_of(name: str) -> str:
    """Slug of a figure's family, by its name."""
    return next((slug for slug, _, pattern in FAMILIES if re.match(pattern, name)), "other")


def _place(name: str) -> tuple[int, str]:
    """Sort key: known figures in the order of TITLES, then the others by name."""
    known = list(TITLES)
    return (known.index(name), "") if name in TITLES else (len(known), name)


def _family(slug: str, title: str, names: Sequence[str], runs: Sequence[tuple[str, Series]]) -> FigureFamily:
    family, headed_lines = FigureFamily(slug, title), list[tuple[str, LineData]]()
    for name, parts in _figures_by_chart(names, together=len(runs) == 1):
        heading, hint = (TITLES_BESIDE if len(parts) > 1 else TITLES).get(name, (name, ""))
        lines = list(_lines(parts, runs))
        chart = line_chart(
            _slug(name),
            heading,
            lines,
            hint=hint,
            share=name in SHARES,
            logarithmic=name in LOGARITHMIC,
            **({"height": LEADING_HEIGHT} if slug == "leading" else {}),
        )
        if chart is not None:
            family.charts.append(chart)
            headed_lines += [(heading, line) for line in lines]
            continue
        family.lone.extend(
            LoneFigure(f"{heading}, {line.label}", number_text(value), step)
            for line in lines
            for step, value in finite_points(line.points)
        )
    table = _table(headed_lines) if headed_lines else None
    return FigureFamily(slug, title, family.charts, family.lone, table)


def _slug(name: str) -> str:
    """Id of a chart in the page: the figure's name, with a hash if that is not plain."""
    plain = re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")
    return (
        plain
        if re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)*", name)
        else f"{plain[:40]}-{crc32(name.encode()):08x}"
    )


def _figures_by_chart(names: Sequence[str], *, together: bool) -> list[tuple[str, list[str]]]:
    """(name of the chart, its figures)."""
    groups: dict[str, list[str]] = {}
    for name in names:
        before, _, part = name.rpartition("/")
        other = f"{before}/{BESIDE.get(part, '')}"
        groups.setdefault(other if together and part in BESIDE and other in names else name, []).append(name)
    return list(groups.items())


def _lines(names: Sequence[str], runs: Sequence[tuple[str, Series]]) -> Iterator[LineData]:
    for number, (label, series) in enumerate(runs, start=1):
        for part, name in enumerate(names, start=1):
            for held_out in (False, True):
                points = series.get(HELD_OUT + name if held_out else name, ())
                if not finite_points(points):
                    continue
                several = len(names) > 1
                of_part = [name.rpartition("/")[2]] if several else []
                labels = ["held out"] if held_out else ["training"] if not label and not several else []
                # one figure of one run: held-out values have their own colour besides dashes
                slot = number if label else part if several else 2 if held_out else 1
                yield LineData(
                    ", ".join([*([label] if label else []), *of_part, *labels]), points, slot, held_out
                )


def _table(drawn: Sequence[tuple[str, LineData]]) -> FigureTable:
    columns = [dict(finite_points(line.points)) for _, line in drawn]
    steps = sorted({step for column in columns for step in _spread(list(column))})
    return FigureTable(
        [f"{title}, {line.label}" for title, line in drawn],
        [
            (step, [number_text(column[step]) if step in column else "" for column in columns])
            for step in steps
        ],
    )


def _spread(steps: Sequence[int]) -> Iterable[int]:
    """At most ROWS_OF_A_LINE of the steps, evenly, including the first and the last."""
    if len(steps) <= ROWS_OF_A_LINE:
        return steps
    last = len(steps) - 1
    return [steps[round(number * last / (ROWS_OF_A_LINE - 1))] for number in range(ROWS_OF_A_LINE)]
