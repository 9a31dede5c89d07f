"""Proximal policy optimisation of a policy (Schulman et al. 2017; Ziegler et al. 2019): sample, judge, learn, log.

Policy, reference, value and reward model share one frozen base through their adapters; log-probabilities are taken at
temperature 1, so that KL and ratio describe the policy as it is served. Read `_loop` from top to bottom.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import get_scheduler

from rl.agents.base import Row
from rl.recipes import BASE, PPORecipe
from rl.training.adapter_trainer import Outcome, TrainRows
from rl.training.constrained_generation import Sampling
from rl.training.policy import LoadedPolicy
from rl.training.ppo_formulas import kl_coef_adapted
from rl.training.ppo_step import experience_gather, experience_metrics, kl_of_rollouts, update
from rl.training.result import TrainingFailed, TrainingRefused, checkpoint_is_whole, checkpoint_last
from rl.training.rewarding import (
    Judge,
    Judgement,
    Prompts,
    RewardedTrainer,
    answer_forms,
    rewards_of,
    rewards_probe,
    valid_share,
)
from rl.training.rollout import Rollout, VllmServer, Watch, draw_seed, repetition_of, sample_responses
from rl.training.run import base_load, failures_explained
from rl.training.shared_base import (
    POLICY,
    VALUE,
    SharedBase,
    State,
    StepStart,
    checkpoint_read,
    checkpoint_write,
)
from rl.training.trl_trainer import TRAINING, is_over, limit_reason

PPOConfig = PPORecipe
"""The recipe by the name that other trainers of this method give theirs."""


class PPOTrainer(RewardedTrainer[PPORecipe, Prompts]):
    """Train an adapter by proximal policy optimisation on prompts and rewards.

    Rows are prompts; other keys, such as the answers of preference pairs, are not looked at. A resumed run makes the
    same steps as if it had never stopped.
    """

    method = "ppo"
    stopped_early = ""

    def load_base_model(self) -> LoadedPolicy:
        if self.policy is None:
            # gradients below 6e-8 vanish in float16, and nothing here scales the loss
            self.policy = base_load(self.context, half=False)
        return self.policy

    def encode(
        self, policy: LoadedPolicy, train_rows: Sequence[Row], eval_rows: Sequence[Row]
    ) -> TrainRows[Prompts]:
        self.base = SharedBase(policy, self.recipe)
        self.context.note_all(self.base.notes)
        self.rewards = self.rewards or rewards_of(self.recipe.reward, self.base)
        rows = self.encode_prompts(policy, train_rows, eval_rows)
        if self.recipe.constrains:
            self.base.forms = answer_forms(policy, self.context.definition, rows.train, rows.held_out)
            self.context.note_all(note for note in policy.notes if note not in self.context.notes)
        return rows

    def fit(self, policy: LoadedPolicy, rows: TrainRows[Prompts], checkpoint: Path | None) -> Outcome:
        recipe = self.recipe
        self.train_prompts, self.eval_prompts = rows.train, rows.held_out
        self.watch = Watch(recipe.max_kl, recipe.start_from == BASE or recipe.has_adapter_reference)
        self._order: tuple[int, list[int]] = (-1, [])
        self._step_start: StepStart | None = None
        self.judge = Judge(self.rewards, self.context.definition)
        self.server = self._server(policy)
        self.optimizer = self._optimizer()
        self.state = State(kl_coef=recipe.init_kl_coef)
        if checkpoint is not None:
            self.state = checkpoint_read(checkpoint, self.base, self.optimizer)
        with failures_explained(self.context):
            try:
                cancelled = self._loop()
            except KeyboardInterrupt:
                if not self._stop_kept():
                    raise
                cancelled = True
            if not cancelled:
                self.context.listener.release()
        state = self.state
        return Outcome(
            state.step, self.total_steps, cancelled, log=state.rows, stopped_early=self.stopped_early
        )

    # --- The loop ---------------------------------------------------------------------------------------------

    def _loop(self) -> bool:
        """Every step that is left; True where the listener ended it."""
        recipe, state, total = self.recipe, self.state, self.total_steps
        listener = self.context.listener
        if self.processes.main:
            listener.on_start(total)
        self.context.phase("testing the fast path")
        self._find_forward()
        if state.step == 0:
            self.context.phase("probing the rewards")
            self._probe()
        self.context.phase(TRAINING)
        remembers = self.processes.count == 1  # one process alone must not leave a step
        if state.step == 0 and self.eval_prompts.ids:
            self._log(self._evaluate() | {"step": 0.0})  # what it starts from, before anything is learnt
        while state.step < total:
            step_began = time.monotonic()
            if remembers:
                self._step_start = StepStart.of(self.base, self.optimizer, state)
                listener.release()
            else:
                listener.hold()
            row = self._step()
            state.step += 1
            last = state.step == total
            if self.eval_prompts.ids and (
                last or (recipe.eval_steps and state.step % recipe.eval_steps == 0)
            ):
                row |= self._evaluate()
            row["step"] = float(state.step)
            listener.hold()
            self._log(row, shown=last or state.step % recipe.logging_steps == 0)
            if self.processes.main:
                self.context.listener.on_step(state.step, total)
            if reason := self.processes.agree(self.watch.see(state.step, row)):
                self._last_good(reason)
                return False
            stop = self.processes.agree(self.context.listener.should_stop())
            due = stop or state.step % recipe.save_steps == 0 or self._epoch_ends()
            if last or (due and not self.watch.bad):  # what is kept is what a diverged run goes back to
                self._save()
            if stop:
                return not last
            if not last and self.processes.agree(is_over(self.context.deadline, step_began)):
                self.stopped_early = limit_reason(state.step, total, recipe.minutes)
                self._save()
                return False
        return False

    def _stop_kept(self) -> bool:
        """Go back to the start of an interrupted step and keep it as a checkpoint; False where there is none."""
        if not self.context.listener.should_stop() or self._step_start is None:
            return False
        self.state = self._step_start.restore(self.base, self.optimizer)
        if not 0 < self.state.step < self.total_steps:
            return False
        folder = self.context.output_dir / "checkpoints" / f"checkpoint-{self.state.step}"
        if not self.watch.bad and not checkpoint_is_whole(folder):
            self._save()
        return True

    def _step(self) -> dict[str, float]:
        """Sample a batch, judge it, learn from it; returns its row of metrics."""
        recipe, state, began = self.recipe, self.state, time.perf_counter()
        self._set_learning_rates()
        rows, rollouts = self._sample(state.step)
        sampling_end = time.perf_counter()
        judgement = self.judge.judge(rows, rollouts)
        judging_end = time.perf_counter()
        experience = experience_gather(
            self.base, rollouts, judgement.scores, recipe, state.kl_coef, self.processes
        )
        row = experience_metrics(experience, state.kl_coef, self.processes)
        row |= update(
            self.base,
            experience,
            self.optimizer,
            recipe,
            self.processes,
            self._generator("order", state.step),
        )
        state.optimiser_steps += int(row["optimiser_steps"])
        if recipe.kl_controller == "adaptive":
            state.kl_coef = kl_coef_adapted(
                state.kl_coef,
                row["kl"],
                recipe.target_kl,
                recipe.kl_horizon,
                recipe.batch_size * self.processes.count,
            )
        now = time.perf_counter()
        row |= self._parts(judgement, rollouts)
        row["valid"] = valid_share(rollouts, rows, self.context.definition)
        row["repetition"] = repetition_of([rollout.item.response_ids for rollout in rollouts])
        row["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        row["seconds_sampling"], row["seconds_judging"] = sampling_end - began, judging_end - sampling_end
        row["seconds_learning"] = now - judging_end
        row["tokens_per_second"] = row["tokens"] * len(rollouts) * self.processes.count / (now - began)
        return row

    def _sample(self, step: int) -> tuple[list[Row], list[Rollout]]:
        """This process's responses of a step, and the rows of its prompts. A function of seed and step."""
        recipe, prompts = self.recipe, self.train_prompts
        share = recipe.batch_size // recipe.samples_per_prompt
        first = (step * self.processes.count + self.processes.index) * share
        chosen = [self._prompt_at(first + i) for i in range(share)]
        rollouts = self._answers(
            [prompts.ids[i] for i in chosen], recipe.samples_per_prompt, self._generator("sample", step)
        )
        return [prompts.rows[i] for i in chosen], rollouts

    def _server(self, policy: LoadedPolicy) -> VllmServer | None:
        """The vLLM server that samples instead of this process, where the recipe names one."""
        if not self.recipe.vllm_server:
            return None
        folder = self.context.output_dir / "sampling" / str(self.processes.index)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        unique = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        return VllmServer(self.recipe.vllm_server, policy, folder, f"ratchet-{unique}-{os.getpid()}")

    def _answers(self, ids: list[list[int]], samples: int, generator: torch.Generator) -> list[Rollout]:
        recipe = self.recipe
        sampling = Sampling(recipe.max_new_tokens, recipe.temperature, recipe.top_k, recipe.top_p)
        if self.server is not None:
            self.server.adapter_send(self.state.optimiser_steps)
            return self.server.sample(ids, samples, sampling, generator.initial_seed())
        training = self.base.model.training
        self.base.model.eval()  # gradient checkpointing would leave out the KV cache
        try:
            with self.base.speaking_as(POLICY) as model:
                return sample_responses(
                    model, self.base.policy.encoder, ids, samples, sampling, generator, self.base.forms
                )
        finally:
            self.base.model.train(training)

    def _evaluate(self) -> dict[str, float]:
        """Reward and KL on held-out prompts, each process answering its share; always with the same draws."""
        recipe, prompts, processes = self.recipe, self.eval_prompts, self.processes
        share = list(range(processes.index, len(prompts.ids), processes.count))
        sums = torch.zeros(5)
        generator = self._generator("evaluate", 0)
        for start in range(0, len(share), recipe.batch_size):
            chosen = share[start : start + recipe.batch_size]
            rollouts = self._answers([prompts.ids[i] for i in chosen], 1, generator)
            scores = self.judge.judge([prompts.rows[i] for i in chosen], rollouts).scores
            sums += torch.tensor(
                [
                    len(rollouts),
                    math.fsum(scores),
                    float(kl_of_rollouts(self.base, rollouts, recipe).sum()),
                    sum(len(rollout.item.response_ids) for rollout in rollouts),
                    sum(rollout.ended for rollout in rollouts),
                ]
            )
        count, reward, kl, tokens, ended = processes.sum(sums.to(self.base.policy.device)).tolist()
        return {
            "eval_reward": reward / count,
            "eval_kl": kl / count,
            "eval_tokens": tokens / count,
            "eval_ended": ended / count,
        }

    # --- What a step is made of ---------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        if self.recipe.max_steps > 0:
            return self.recipe.max_steps
        return max(1, math.ceil(self.recipe.epochs * len(self.train_prompts.ids) / self._prompts_per_step))

    @property
    def _prompts_per_step(self) -> int:
        return self.recipe.batch_size // self.recipe.samples_per_prompt * self.processes.count

    def _epoch_ends(self) -> bool:
        """True if this step completed a pass over the prompts."""
        size, per_step = len(self.train_prompts.ids), self._prompts_per_step
        return self.state.step * per_step // size > (self.state.step - 1) * per_step // size

    def _prompt_at(self, place: int) -> int:
        """The prompt at a place of the endless sequence of shuffled passes over all prompts."""
        size = len(self.train_prompts.ids)
        epoch, within = divmod(place, size)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed("prompts", epoch))
            self._order = epoch, torch.randperm(size, generator=generator).tolist()
        return self._order[1][within]

    def _generator(self, purpose: str, step: int) -> torch.Generator:
        """Fresh and the same for a seed, a purpose, a step and a process: a resumed run needs no random state."""
        device = self.base.policy.device if purpose in ("sample", "evaluate") else torch.device("cpu")
        seed = self._seed(purpose, step * self.processes.count + self.processes.index)
        return torch.Generator(device).manual_seed(seed)

    def _seed(self, purpose: str, number: int) -> int:
        return draw_seed(self.recipe.seed, purpose, number)

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        rates = {POLICY: recipe.learning_rate, VALUE: recipe.value_learning_rate or recipe.learning_rate}
        groups = [
            {"params": list(self.base.parameters_of(role).values()), "lr": rate, "peak": rate}
            for role, rate in rates.items()
        ]
        return torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)

    def _set_learning_rates(self) -> None:
        """The schedule's rate at this step. Asked as a function of the step, it has no state to save."""
        recipe, total = self.recipe, self.total_steps
        warmup = math.ceil(recipe.warmup_ratio * total)
        schedule = get_scheduler(
            recipe.lr_scheduler,
            torch.optim.SGD([torch.zeros(1)]),
            num_warmup_steps=warmup,
            num_training_steps=total,
        )
        factor = schedule.lr_lambdas[0](self.state.step + (1 if warmup else 0))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    def _probe(self) -> None:
        """Raises TrainingRefused for rewards that tell no sampled answer from another."""
        if self.recipe.allow_constant_reward:
            return
        generator = self._generator("sample", -2)
        fault = rewards_probe(
            self.train_prompts,
            self.judge,
            lambda ids, samples: self._answers(ids, samples, generator),
            self.recipe.batch_size,
        )
        if fault := self.processes.agree(fault):
            raise TrainingRefused(fault)

    def _last_good(self, reason: str) -> None:
        """Go back to the newest checkpoint, which is from before the run diverged. Raises TrainingFailed for none."""
        path, _ = checkpoint_last(self.context.output_dir / "checkpoints")
        if path is None:
            raise TrainingFailed(
                f"{reason}, before a checkpoint was written. Lower learning_rate (now {self.recipe.learning_rate:g}), "
                "raise init_kl_coef, or lower save_steps to have something to go back to"
            )
        rows = self.state.rows
        self.state = checkpoint_read(path, self.base, self.optimizer)
        self.state.rows = rows
        self.stopped_early = f"{reason}; the policy is that of step {self.state.step}"
        self.context.note(f"stopped early: {self.stopped_early}")

    def _find_forward(self) -> None:
        """Sample a little to find the quickest forward that is right for this model; nothing is learnt from it."""
        ids = sorted(self.train_prompts.ids, key=len)
        rollouts = self._answers([ids[-1], ids[0]], 2, self._generator("sample", -1))
        self.context.detail(self.base.strategy_find([rollout.item for rollout in rollouts]))

    # --- Logging and results ----------------------------------------------------------------------------------

    def _parts(self, judged: Judgement, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Each reward's own mean and the share of responses that ended, over all processes."""
        names = [function.name for function in self.rewards]
        device = self.base.policy.device
        own = [[judged.parts.get(name, 0.0), float(name in judged.parts)] for name in names]
        sums = self.processes.sum(torch.tensor(own, device=device))
        found = {
            f"reward/{name}": total / count
            for name, (total, count) in zip(names, sums.tolist(), strict=True)
            if count
        }
        ended = torch.tensor(sum(r.ended for r in rollouts) / len(rollouts), device=device)
        return {**found, "ended": float(self.processes.sum(ended)) / self.processes.count}

    def _log(self, row: dict[str, float], *, shown: bool = True) -> None:
        self.state.rows.append(row)
        if shown and self.processes.main:
            said = {name: value for name, value in row.items() if name != "step" and math.isfinite(value)}
            self.context.listener.on_metrics(int(row["step"]), said)

    def _save(self) -> None:
        if self.processes.main:
            checkpoint_write(
                self.context.output_dir / "checkpoints",
                self.base,
                self.optimizer,
                self.state,
                agent=self.context.agent,
            )
        self.processes.wait()
