"""Training of a run, from an order or a queued row to a candidate policy, or to a stored reason why not.

Torch is imported inside functions alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from django.db import InterfaceError, OperationalError, connection

from rl.agents.base import Agent
from rl.datasets import DatasetRefused
from rl.datasets.buffer import feedback_release, run_rewards_resolve
from rl.datasets.reward_records import RewardsRefused
from rl.datasets.rows import agent_check
from rl.jobs import linear as linear_runs
from rl.jobs.lifecycle import (
    MAX_ATTEMPTS,
    TrainOrder,
    base_model_for,
    base_model_settle,
    order_of_queued,
    run_claim,
    run_finish,
    run_interrupt,
    run_refuse,
)
from rl.jobs.plan import dataset_of_claimed, run_register
from rl.jobs.progress import (
    HARDWARE,
    READING,
    PhaseRecorder,
    ProgressCallback,
    RunListener,
    phase_callback,
    pulse,
    run_log,
    stop_signals,
)
from rl.jobs.results import figures_of, policy_publish, result_persist, run_warning, train_report
from rl.jobs.run_recipe import recipe_for, recipe_timed
from rl.jobs.stages import (
    StageRunner,
    StageStopped,
    form_stage_run,
    linear_stage_run,
    reward_model_resolve,
    start_stage_run,
    waits_for_reward_model,
)
from rl.jobs.trainer import answers_of_base, code_version, hardware_of, trainer_run
from rl.models import TrainingRun
from rl.models.agent_definitions import agent_served
from rl.models.runs import RunRefused, run_folder
from rl.recipes import RecipeError
from rl.recipes.base import Method
from rl.recipes.methods import method_named
from rl.registry.service import RegistryRefused
from rl.reward_models.service import (
    RewardModelRefused,
    reward_model_judge,
    reward_model_register,
)
from rl.rewards.catalogue import RewardRefused

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.run import Processes

Status = TrainingRun.Status

REFUSALS = (
    DatasetRefused,
    RecipeError,
    RegistryRefused,
    RewardModelRefused,
    RewardRefused,
    RewardsRefused,
    RunRefused,
)
"""What a run may not do; its message stands as the run's reason."""


def train(
    order: TrainOrder,
    progress: ProgressCallback | None = None,
    note: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Dataset, run, training, registry: from an order to a candidate policy, or to a stored reason why not.

    In a launch of several processes (`accelerate launch`) the first does all of this; the others only compute, and
    end with Beside. Raises what refuses (DatasetRefused, RecipeError, RunRefused, TrainingRefused) or fails
    (TrainingFailed); the run's row has been marked by then. `note` is told before anything is loaded why the training
    may teach nothing.
    """
    if order.source == "db":
        agent_check(order.agent)  # before torch is loaded, which takes seconds
    phase_callback(progress)(HARDWARE)
    hardware = hardware_of(order.definition)
    with _launch_of(hardware) as launch:
        if hardware is not None and not launch.first:
            _train_follower(launch, hardware)
        order = base_model_settle(order, phase_callback(progress))
        phase_callback(progress)(READING)
        run = run_register(order, hardware, phase_callback(progress))
        for why in filter(None, (run_warning(run), run.result.get("not_fitted"))):
            if note is not None:
                note(why)
        return _run_claimed(run_claim(run.pk), hardware, progress, launch, actor=order.actor)


def train_queued(run_id: int, progress: ProgressCallback | None = None, *, actor: str) -> dict[str, object]:
    """Train a run that `run_enqueue` entered. What refuses it is raised, and stands as the run's reason."""
    return _train_entered(run_id, progress, actor=actor, resume=False)


def train_resume(run_id: int, progress: ProgressCallback | None = None, *, actor: str) -> dict[str, Any]:
    """Go on with a run that was killed, cancelled or failed, from its last whole checkpoint, with its own recipe."""
    return _train_entered(run_id, progress, actor=actor, resume=True)


def _train_entered(
    run_id: int, progress: ProgressCallback | None, *, actor: str, resume: bool
) -> dict[str, object]:
    phase_callback(progress)(HARDWARE)
    hardware = hardware_of(
        method_named(TrainingRun.objects.filter(pk=run_id).values_list("method", flat=True).first() or "dpo")
    )
    with _launch_of(hardware) as launch:
        if hardware is not None and not launch.first:
            _train_follower(launch, hardware)
        run = run_claim(run_id, resume=resume)
        with pulse(run):
            phase = PhaseRecorder(run, progress)
            phase(0, 0, READING)
            # by a worker that died; one that was killed before it had its dataset starts over
            begun = run.snapshot is not None
            if begun:
                feedback_release(run)
            _settle(run, hardware, lambda text: phase(0, 0, text))
            return _run_claimed(run, hardware, progress, launch, actor=actor, resume=begun)


def _train_follower(launch: Launch, hardware: Hardware) -> NoReturn:
    """A further process of a launch: its share of the arithmetic, and not a word to database, log or screen."""
    from rl.training.result import Silent

    more = True
    while more:
        run_id, resume, more = launch.follow()
        run = TrainingRun.objects.get(pk=run_id)
        trainer_run(run, agent_served(run.agent), hardware, Silent(), resume=resume)
    raise FollowerEnded(f"run {run_id} is reported by the first process of this launch")


def _launch_of(hardware: Hardware | None) -> AbstractContextManager[Launch]:
    """This process's part in its launch; what trains no adapter is never spread over several processes."""
    return launch_join(_processes(hardware) if hardware is not None else SingleProcess())


def _processes(hardware: Hardware) -> Processes:
    from rl.training.run import Processes

    return Processes(cpu=hardware.device == "cpu")


def _settle(run: TrainingRun, hardware: Hardware | None, phase: Callable[[str], None]) -> None:
    """Give a claimed run that was only asked for its base model, preset, recipe and dataset; a run that has them is
    left alone."""
    try:
        if run.snapshot is None:
            order = base_model_settle(order_of_queued(run), phase)
            run.base_model = base_model_for(order)
            run.config, recipe = recipe_for(order, hardware)
            dataset = dataset_of_claimed(run, order, recipe)
            run.snapshot = dataset.snapshot
            recipe, not_fitted = recipe_timed(order, recipe, dataset, hardware, phase)
            run.result |= {"not_fitted": not_fitted} if not_fitted else {}
            run.recipe, run.seed = recipe.as_dict(), recipe.seed
            run.hardware = hardware.as_dict() if hardware is not None else {}
            run.code_version = code_version()
            run.save(
                update_fields=[
                    "base_model",
                    "config",
                    "recipe",
                    "seed",
                    "snapshot",
                    "hardware",
                    "code_version",
                    "result",
                ]
            )
    except REFUSALS as refusal:
        run_refuse(run, refusal)
        raise
    except BaseException as error:
        _run_end(run, error)
        raise


def _run_claimed(
    run: TrainingRun,
    hardware: Hardware | None,
    progress: ProgressCallback | None,
    launch: Launch,
    *,
    actor: str,
    resume: bool = False,
    is_stage: bool = False,
) -> dict[str, object]:
    """Train a run this process holds, and enter what it makes. is_stage: another run of this launch follows it."""
    from rl.training.result import TrainingRefused

    folder, began, agent = run_folder(run), time.monotonic(), agent_served(run.agent)
    listener: RunListener | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with run_log(folder / "train.log"), stop_signals() as stop, pulse(run, stop):
            listener = RunListener(run, stop, progress)
            if hardware is None:
                result = linear_runs.run_fit(run, agent, listener)
            else:
                _stages_first(run, agent, hardware, progress, launch, listener)
                launch.lead(run.pk, resume=resume, more=is_stage)
                result = trainer_run(run, agent, hardware, listener, resume=resume, began=began)
            listener.on_phase("writing the results")
            result_persist(run, result)
        policy, judge = None, None
        if result.status != "cancelled" and run.method == "reward_model":
            figures = figures_of(run, result)

            def finish(reason: str) -> None:
                run_finish(run, Status.SUCCEEDED, reason=reason, **figures)

            judge = reward_model_register(run, result, finish=finish)
        if result.status != "cancelled" and run.definition.policy:
            policy = policy_publish(run, result, actor=actor)
    except KeyboardInterrupt:
        # a second Ctrl-C, or one that came before this run could handle it
        if listener is None or not listener.should_stop():
            run_finish(run, Status.CANCELLED, reason="stopped by Ctrl-C")
            raise
        return _stopped_between_steps(run, f"stopped during {listener.phases.words or 'its start'}")
    except StageStopped as stopped:
        return _stopped_between_steps(run, str(stopped), cancelled=stopped.cancelled)
    except (TrainingRefused, *REFUSALS) as refusal:
        run_refuse(run, refusal)
        raise
    except BaseException as error:
        _run_end(run, error)
        raise
    if judge is not None and hardware is not None:
        reward_model_judge(judge, hardware=hardware)
    elif policy is None:
        where = f"stopped at step {result.steps} of {result.total_steps}"
        _run_stop(run, where, **figures_of(run, result))
    report = train_report(run, result, policy, judge)
    return report | {"stopped": where} if result.status == "cancelled" else report


def _stages_first(
    run: TrainingRun,
    agent: Agent,
    hardware: Hardware,
    progress: ProgressCallback | None,
    launch: Launch,
    listener: RunListener,
) -> None:
    """The stages of a run, as runs of their own: a linear policy where `auto` chose the run; SFT where it starts from
    that; where its reward is `auto`, the form of an answer where the base model gives few valid ones, then its reward
    model. Each is found, gone on with, or trained."""

    def train_stage(stage: TrainingRun) -> dict[str, object]:
        resume = stage.status != Status.QUEUED
        stage = run_claim(stage.pk, resume=resume)
        device = device_of(stage.definition)
        return _run_claimed(
            stage, device, progress, launch, actor=stage.asked_by, resume=resume, is_stage=True
        )

    def device_of(method: Method) -> Hardware | None:
        return hardware if method.adapter else None

    stage_runner = StageRunner(
        lambda order: run_register(order, device_of(order.definition), listener.on_phase), train_stage
    )
    if run.method_reason:
        linear_stage_run(run, stage_runner)
    start_stage_run(run, stage_runner)
    if not waits_for_reward_model(run):
        return
    form_stage_run(run, lambda: answers_of_base(run, agent, hardware, listener.on_phase), stage_runner)
    listener.on_phase("looking for a reward model")
    reward_model_resolve(run, stage_runner)
    run_rewards_resolve(run)


def _stopped_between_steps(run: TrainingRun, where: str, *, cancelled: bool = False) -> dict[str, object]:
    """End a run that was stopped in a stage or outside its steps, and report it."""
    _run_stop(run, where, cancelled=cancelled)
    return {
        "run": run.pk,
        "method": run.method,
        "status": "cancelled",
        "policy": None,
        "agent": run.agent,
        "why": run.result.get("why", ""),
        "stopped": where,
        "steps": run.steps_done,
        "total_steps": run.steps_total,
    }


def _run_stop(run: TrainingRun, where: str, *, cancelled: bool = False, **figures: object) -> None:
    """Back to the workers if a worker was stopped, else cancelled; either can be resumed."""
    run.refresh_from_db()
    if run.dispatched_at is not None and not run.cancel_requested and not cancelled:
        run_interrupt(run, reason=f"{where}: its worker was stopped", **figures)
    else:
        prefix = f"{run.reason}, " if run.cancel_requested else ""
        run_finish(run, Status.CANCELLED, reason=f"{prefix}{where}", **figures)


def _run_end(run: TrainingRun, error: BaseException) -> None:
    """A claimed run met the unexpected: it failed, or goes back to the workers where only the database went away."""
    transient = isinstance(error, (OperationalError, InterfaceError))
    if transient and run.dispatched_at is not None and run.attempts < MAX_ATTEMPTS:
        connection.close()  # what is left of it
        run_interrupt(
            run, reason=f"the connection to the database was lost: {str(error).strip().splitlines()[0]}"
        )
    else:
        run_finish(run, Status.FAILED, reason=f"{type(error).__name__}: {error}")


T = TypeVar("T")


class ProcessGroup(Protocol):
    """Interface of `rl.training.run`."""

    @property
    def main(self) -> bool: ...

    def agree(self, said: T) -> T: ...


class SingleProcess:
    """The only process there is."""

    main = True

    def agree(self, said: T) -> T:
        return said


class FollowerEnded(Exception):
    """Not an error: this process did its share of a run, and another of the launch speaks for it."""


class Launch:
    """Run that the processes of one launch train. The first says it once; the others wait for its word."""

    def __init__(self, processes: ProcessGroup) -> None:
        self.processes = processes
        self.first = processes.main
        self._said = False

    def lead(self, run_id: int, *, resume: bool, more: bool = False) -> None:
        """The first process begins this run, and the others with it. more: another run of this launch follows it."""
        self._said = not more
        self.processes.agree((run_id, resume, more))

    def give_up(self) -> None:
        """The first process will begin no run: without a word the others would wait for ever."""
        if not self._said:
            self._said = True
            self.processes.agree(None)

    def follow(self) -> tuple[int, bool, bool]:
        """The run another process leads, whether it is resumed, and whether another one follows it. Raises RunRefused
        where it began none."""
        command: tuple[int, bool, bool] | None = self.processes.agree(None)
        if command is None:
            raise RunRefused("the first process of this launch started no run; see its message above")
        return command


@contextmanager
def launch_join(processes: ProcessGroup) -> Iterator[Launch]:
    """This process's part in its launch; alone, it is the first."""
    launch = Launch(processes)
    try:
        yield launch
    except BaseException:
        if launch.first:
            launch.give_up()
        raise
