"""Benchmarks of a policy and of its base by lm-evaluation-harness (EleutherAI, MIT), on the same items.

The harness builds the prompts, asks the model and scores; this module gives it the model that training and evaluation
use (one loading, one precision, the adapter switched off for the base), local items, and three walls: templates run in
Jinja's sandbox, a metric that is not the harness's own is not fetched, and code that a model wrote runs in
`rl.rewards` alone, never by the harness.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import huggingface_hub
import lm_eval.api.task
from jinja2 import BaseLoader, StrictUndefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.registry import metric_registry
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from rl.agents.base import Row
from rl.recipes.benchmark_tasks import HUB, TaskFolder, TaskRefused, listed_option
from rl.rewards.base import RewardSample, reward_normalise
from rl.rewards.code_execution import CodeExecutionReward
from rl.training.policy import LoadedPolicy, matmul

if TYPE_CHECKING:
    import torch
    from lm_eval.api.instance import Instance

HARNESS = f"lm-eval {lm_eval.__version__}"

Progress = Callable[[int, int, str], None]
"""Function called with requests answered, requests in all, and the side asked: `policy` or `base`."""

SEED = 1234
"""Of the harness's draws (few-shot examples); its own default."""


@dataclass(frozen=True)
class TaskFigures:
    """Scores of the policy and of its base on every item of a task, in the task's order."""

    task: str
    source: str
    """`bundled`, a folder's path, or `hub`."""
    version: str
    sha256: str
    """Of the task's files; empty for one of the hub, whose version says what it is."""
    metric: str
    fewshot: int
    items: tuple[str, ...]
    """Hash of each item, as the harness gives it."""
    policy: tuple[float, ...]
    base: tuple[float, ...]


class HarnessModel(HFLM):
    """A loaded policy as the harness asks it."""

    def __init__(self, policy: LoadedPolicy, batch_size: int, side: str, progress: Progress | None) -> None:
        # what fits the model's context is settled by the encoder already
        super().__init__(
            pretrained=policy.model,
            tokenizer=policy.tokenizer,
            batch_size=batch_size,
            max_length=policy.context,
        )
        self.rows_done = self.rows = 0
        self.side, self.progress = side, progress

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[object]:
        self.rows += len(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[object]:
        self.rows += len(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def _model_call(self, inps: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
        found = super()._model_call(inps, *rest, **more)
        self._advance(len(inps))
        return found

    def _model_generate(self, context: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
        found = super()._model_generate(context, *rest, **more)
        self._advance(len(context))
        return found

    def _advance(self, rows: int) -> None:
        self.rows_done += rows
        if self.progress:
            self.progress(min(self.rows_done, self.rows), self.rows, self.side)


def benchmark(
    policy: LoadedPolicy,
    tasks: Sequence[TaskFolder | str],
    *,
    limit: int | None = None,
    fewshot: int | None = None,
    batch_size: int = 16,
    chat_template: bool = True,
    hub: bool = False,
    code: bool = False,
    progress: Progress | None = None,
) -> list[TaskFigures]:
    """Figures of a policy and of its base on each task.

    tasks: folders, or names that the harness knows; the data of these come from the hub's cache, and from the hub where
    `hub`. limit: first items of each task. chat_template: items are asked as the policy is, where its tokenizer has a
    template. code: whether `code_execution` may run. Raises TaskRefused.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    chat = chat_template and bool(policy.tokenizer.chat_template)
    with _sandbox(hub=hub), matmul(policy.hardware):
        opened = _open_tasks(tasks, code=code)
        sides = [_run_tasks(policy, opened, limit, fewshot, batch_size, chat, "policy", progress)]
        with policy.without_adapter():
            sides.append(
                _run_tasks(
                    policy, _open_tasks(tasks, code=code), limit, fewshot, batch_size, chat, "base", progress
                )
            )
    return [
        _figures(task, source, sha256, *(side[task.config.task] for side in sides))
        for task, source, sha256 in opened
    ]


TaskFiles = tuple[Task, str, str]
"""The harness's task, its source, and the hash of its files."""


def _open_tasks(tasks: Sequence[TaskFolder | str], *, code: bool) -> list[TaskFiles]:
    found: list[TaskFiles] = []
    for task in tasks:
        if isinstance(task, TaskFolder):
            found.append((_local(task, code=code), task.source, task.sha256))
        else:
            found += [(one, HUB, "") for one in _harness_tasks(task)]
    names = [task.config.task for task, _, _ in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TaskRefused(f"the task {twice[0]} was asked for twice; name each once")
    return found


def _local(task: TaskFolder, *, code: bool) -> Task:
    if task.runs_code and not code:
        raise TaskRefused(
            f"{task.name} runs code that the model wrote, in the sandbox, and that is off: set "
            "ENABLE_CODE_EXECUTION=true (docs/reward-reference.md says what the sandbox is)"
        )
    scorer = task.config.get("process_results")
    for metric in task.config["metric_list"]:
        if scorer is None and metric.get("metric") not in metric_registry:
            raise TaskRefused(
                f"{task.name}: the harness has no metric {metric.get('metric')!r} of its own, and none is fetched"
            )
    config = {
        **task.config,
        "custom_dataset": lambda **_: datasets.DatasetDict(
            {split: datasets.Dataset.from_list(rows) for split, rows in task.items.items()}
        ),
        **({"process_results": _SCORERS[scorer]} if scorer else {}),
    }
    try:
        return ConfigurableTask(config=config)
    except SecurityError as error:
        raise TaskRefused(f"{task.name}: a template does what templates may not: {error}") from error
    except Exception as error:  # a configuration is anybody's text, and the harness raises whatever it meets
        raise TaskRefused(
            f"{task.name}: the harness cannot use this configuration: {_words(error)}"
        ) from error


def _choice_metrics(doc: Row, results: list[str]) -> dict[str, float]:
    return {"listed": float(listed_option(results[0].strip(), doc["options"]))}


def _code_metrics(doc: Row, results: list[str]) -> dict[str, float]:
    sample = RewardSample(prompt=[], response=results[0], agent="", facts=doc)
    (value,) = CodeExecutionReward(enabled=True).score([sample])
    if value.raw is None:
        raise TaskRefused(f"an item's tests cannot be run: {value.detail.get('why', 'no reason given')}")
    return {"passed": reward_normalise(value.raw)}


_SCORERS = {"listed_option": _choice_metrics, "code_execution": _code_metrics}


def _harness_tasks(name: str) -> list[Task]:
    """The harness's own tasks of a name; several of a group."""
    manager = TaskManager()
    entry = manager._entry(name)
    if entry is None:
        near = ", ".join([one for one in manager.all_tasks if name.lower() in one.lower()][:5])
        raise TaskRefused(
            f"no task is named {name!r}: expected one that comes with the project, the path of a task folder, or a "
            f"name of the harness{f', such as {near}' if near else ''}; docs/figures.md lists them"
        )
    for leaf in _leaves(manager, name):
        if leaf.get("unsafe_code"):
            raise TaskRefused(
                f"{name} runs code that the model wrote by the harness's own means, which is never done here; put its "
                "items into a task folder with `process_results: code_execution` (docs/figures.md)"
            )
    try:
        return list(manager.load([name])["tasks"].values())
    except Exception as error:  # datasets, hub and network each have errors of their own
        raise TaskRefused(
            f"the data of {name} cannot be had: {_words(error)}. Fetched data are taken from the hub's cache; --hub "
            "fetches them where the hub can be reached, and a task folder needs neither"
        ) from error


def _leaves(manager: TaskManager, name: str) -> list[dict[str, object]]:
    """Configurations of a task, or of every task of a group or tag, as they are written: no function is resolved."""
    entry = manager._index.get(name)
    if entry is None:
        return []
    if not entry.yaml_path:
        return [_leaf for tag in sorted(entry.tags) for _leaf in _leaves(manager, tag)]
    config = load_yaml(entry.yaml_path, resolve_func=False, recursive=True)
    found = [config]
    for part in config.get("task") if isinstance(config.get("task"), list) else []:
        inner = part if isinstance(part, str) else part.get("task") or part.get("group")
        found += _leaves(manager, inner) if isinstance(inner, str) and inner != name else [part]
    return found


def _run_tasks(
    policy: LoadedPolicy,
    opened: Sequence[TaskFiles],
    limit: int | None,
    fewshot: int | None,
    batch_size: int,
    chat: bool,
    side: str,
    progress: Progress | None,
) -> dict[str, list[Row]]:
    """Task -> the harness's record of every item, of one side."""
    try:
        evaluation = simple_evaluate(
            model=HarnessModel(policy, batch_size, side, progress),
            tasks=[task for task, _, _ in opened],
            task_manager=TaskManager(include_defaults=False),
            limit=limit,
            num_fewshot=fewshot,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat,
            random_seed=SEED,
            numpy_random_seed=SEED,
            torch_random_seed=SEED,
            fewshot_random_seed=SEED,
        )
    except SecurityError as error:
        raise TaskRefused(f"a template does what templates may not: {error}") from error
    samples: dict[str, list[Row]] = evaluation["samples"]
    return samples


def _figures(task: Task, source: str, sha256: str, own: list[Row], base: list[Row]) -> TaskFigures:
    """Per item the first metric of the task that is one number in [0, 1] of which more is better."""
    name = str(task.config.task)
    first = own[0]["filter"]  # of several ways to read an answer the first
    sides = [[one for one in records if one["filter"] == first] for records in (own, base)]
    for metric, better in task.higher_is_better().items():
        values: list[list[Any]] = [[one.get(metric) for one in records] for records in sides]
        if better and all(_is_share(value) for side in values for value in side):
            return TaskFigures(
                task=name,
                source=source,
                version=str(task.VERSION if task.VERSION is not None else ""),
                sha256=sha256,
                metric=metric,
                fewshot=int(task.config.num_fewshot or 0),
                items=tuple(str(one["doc_hash"]) for one in sides[0]),
                policy=tuple(float(value) for value in values[0]),
                base=tuple(float(value) for value in values[1]),
            )
    raise TaskRefused(
        f"{name}: none of its metrics ({', '.join(task.higher_is_better())}) is a number from 0 to 1 for each item of "
        "which more is better, so policy and base cannot be paired on it"
    )


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _words(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


@contextlib.contextmanager
def _sandbox(*, hub: bool) -> Iterator[None]:
    """Inside, templates run in Jinja's sandbox and, unless `hub`, nothing is fetched."""
    environment, bars = lm_eval.utils.env, lm_eval.api.task.tqdm
    offline = (huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    walled = ImmutableSandboxedEnvironment(
        loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
    )
    walled.filters |= environment.filters
    lm_eval.utils.env = walled
    lm_eval.api.task.tqdm = lambda rows, **_: rows  # a command has a bar of its own
    if not hub:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        lm_eval.utils.env, lm_eval.api.task.tqdm = environment, bars
        huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline
