"""Integrity of policies' files: compares them with their recorded checksums and reports damage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from django.conf import settings

from backend import notifications
from backend.installation import PROGRAM
from rl import artifacts
from rl.bundled_models import BUNDLED_MODEL, resolve_base_model
from rl.checksums import FileDamaged, base_fault, file_check, is_sum, sums_check
from rl.linear.model import WEIGHTS as LINEAR_WEIGHTS
from rl.models import Policy, RewardModelVersion, Snapshot
from rl.models.policies import PolicyEvent

logger = logging.getLogger("rl.registry.integrity")

WEIGHTS = "adapter_model.safetensors"
"""Weights file of an adapter and of a reward model."""
RESTORE = "restore it from a backup"

_reported_faults: set[str] = set()
_telling = threading.Lock()


@dataclass(frozen=True)
class Damage:
    """One file or folder that was compared with its record."""

    what: str
    """Owner of the file: `policy widgets-v3`, `snapshot 7`."""
    kind: str
    """adapter, export, snapshot, reward model or base model."""
    path: str
    state: str
    """whole, damaged, missing, or unrecorded without a checksum."""
    expected: str = ""
    found: str = ""
    remedy: str = ""

    @property
    def sound(self) -> bool:
        return self.state in ("whole", "unrecorded")


def weights_name(kind: str) -> str:
    """Name of the weights file of a policy's kind or a reward model's architecture."""
    return LINEAR_WEIGHTS if kind == Policy.Kind.LINEAR else WEIGHTS


class PolicyWithoutFiles(ValueError):
    """A policy that was not trained here and has no files; the message says what to do."""

    def __init__(self, policy: Policy, wish: str) -> None:
        self.policy = policy
        super().__init__(
            f"{policy.name} has no files to {wish}: it is {KINDS_WITHOUT_FILES[policy.kind]}; name a policy that was "
            f"trained here (`{PROGRAM} policy list --agent {policy.agent}`)"
        )


KINDS_WITHOUT_FILES: dict[str, str] = {
    Policy.Kind.RECORDED: "known by the answers that its app recorded",
    Policy.Kind.HOSTED: "a hosted model",
}


def files_check(policy: Policy, wish: str) -> None:
    """Raises PolicyWithoutFiles if a policy has no files. wish: what they were needed for, such as `export`."""
    if not policy.has_files:
        raise PolicyWithoutFiles(policy, wish)


def adapter_folder(policy: Policy, wish: str = "load") -> Path:
    """The folder of a policy's adapter, verified. Raises PolicyWithoutFiles, and FileDamaged, which is
    also reported."""
    files_check(policy, wish)
    folder = settings.RATCHET_HOME / policy.adapter_path
    try:
        artifacts.fetch(policy.adapter_path)
    except artifacts.StoreFailed as failure:
        if not folder.is_dir():
            raise FileDamaged(folder, policy.adapter_sha256, "", str(failure)) from failure
        logger.warning("%s", failure)
    if folder.is_dir():  # one that is gone is refused by whoever opens it, in the words of that place
        try:
            adapter_check(policy, folder)
        except FileDamaged as damage:
            damage_notify(damage, f"policy {policy.name}")
            raise
    return Path(folder)


def adapter_check(policy: Policy, folder: Path) -> None:
    """Raises FileDamaged if a file of the adapter differs from its record."""
    remedy = adapter_remedy(policy)
    file_check(folder / weights_name(policy.kind), policy.adapter_sha256, remedy)
    sums_check(folder, remedy)


def adapter_remedy(policy: Policy) -> str:
    back = f", or roll back: policy rollback {policy.agent}" if policy.stage == Policy.Stage.CHAMPION else ""
    again = f"train it again from run {policy.run_id}" if policy.run_id else "train it again"
    return f"{RESTORE}, {again}{back}"


def base_fault_of(policy: Policy) -> str:
    """Why a policy's base model is no longer the one it was trained on; empty if it is, or if it has none."""
    if policy.kind != Policy.Kind.ADAPTER:
        return ""
    source = str(Path(resolve_base_model(policy.base_model)).expanduser())
    return base_fault(policy.base_model, source, policy.base_model_hash)


def damage_notify(damage: FileDamaged, whose: str) -> None:
    """Logs a damaged file and sends a notice in the background, once per process and state of the file."""
    facts = {"path": str(damage.path), "expected": damage.expected, "found": damage.found}
    _tell(f"{damage.path}:{damage.found}", "artifact_damaged", f"{whose}: {damage}", **facts)


def stand_in_notify(agent: str, intended: str, answered: str) -> None:
    """Logs which policy answers in place of a damaged one and sends a notice, once per process and pair."""
    text = (
        f"{agent}: the file of {intended} is damaged; {answered} answers in its place until it is restored. "
        f"For details: {PROGRAM} policy verify {intended}"
    )
    facts = {"agent": agent, "intended": intended, "answered": answered}
    _tell(f"{agent}:{intended}:{answered}", "damaged_policy_replaced", text, **facts)


def _tell(key: str, event: str, text: str, **facts: str) -> None:
    with _telling:
        if key in _reported_faults:
            return
        _reported_faults.add(key)
    logger.error(text)
    send = partial(notifications.notify, event, text, **facts)
    threading.Thread(target=send, name="ratchet-notice", daemon=True).start()


def verify(policies: Iterable[Policy] | None = None) -> dict[str, object]:
    """Compares files with their checksums: of these policies, or of all policies, snapshots, reward models and base
    models.

    Reports damage. Returns {checked, damaged, missing, unrecorded, findings}; findings leave out sound files.
    """
    rows = list(_findings(policies))
    states = [row.state for row in rows]
    return {
        "checked": len(rows),
        **{state: states.count(state) for state in ("whole", "damaged", "missing", "unrecorded")},
        "findings": [asdict(row) for row in rows if not row.sound],
    }


def _findings(policies: Iterable[Policy] | None) -> Iterator[Damage]:
    named = policies is not None
    for policy in Policy.objects.order_by("pk") if policies is None else policies:
        yield from _of_policy(policy)
    if named:
        return
    for snapshot in Snapshot.objects.order_by("pk"):
        path = settings.RATCHET_HOME / snapshot.path
        yield _finding(
            f"snapshot {snapshot.pk}",
            "snapshot",
            path,
            snapshot.sha256,
            f"{RESTORE}, or build a new dataset by training again",
        )
    for version in RewardModelVersion.objects.order_by("pk"):
        folder = settings.RATCHET_HOME / version.path
        weights = folder / weights_name(version.architecture)
        yield from _weights_findings(
            version.name, "reward model", weights, version.sha256, f"{RESTORE}, or train it again"
        )
    yield _folder_finding(
        "the bundled base model", BUNDLED_MODEL, "check it out again: git checkout rl/bundled_model"
    )
    for folder in sorted((settings.RATCHET_HOME / "exports" / "bases").glob("*")):
        yield _folder_finding(
            f"base {folder.name[:20]}", folder, "delete the file: it is written again when needed"
        )


def _of_policy(policy: Policy) -> Iterator[Damage]:
    if not policy.has_files or policy.events.filter(kind=PolicyEvent.Kind.PRUNED).exists():
        return  # there are none, or they were removed on purpose
    folder = settings.RATCHET_HOME / policy.adapter_path
    whose = f"policy {policy.name}"
    weights = folder / weights_name(policy.kind)
    yield from _weights_findings(whose, "adapter", weights, policy.adapter_sha256, adapter_remedy(policy))
    for artifact in policy.artifacts.order_by("pk"):
        again = f"export it again: export_model --policy {policy.name} --format {artifact.format}"
        yield _finding(whose, "export", settings.RATCHET_HOME / artifact.path, artifact.sha256, again)


def _weights_findings(what: str, kind: str, weights: Path, expected: str, remedy: str) -> Iterator[Damage]:
    """The weights, and the first other file of their folder that is damaged."""
    yield _finding(what, kind, weights, expected, remedy)
    rest = _folder_finding(what, weights.parent, remedy, kind)
    if not rest.sound and rest.path != str(weights):
        yield rest


def _finding(what: str, kind: str, path: Path, expected: str, remedy: str) -> Damage:
    if path.exists() and not is_sum(expected):
        return Damage(what, kind, str(path), "unrecorded")
    try:
        file_check(path, expected if is_sum(expected) else "0" * 64, remedy)
    except FileDamaged as damage:
        return _damage_of(what, kind, damage)
    except OSError as error:
        return Damage(what, kind, str(path), "damaged", expected, error.strerror or str(error), remedy)
    return Damage(what, kind, str(path), "whole")


def _folder_finding(what: str, folder: Path, remedy: str, kind: str = "base model") -> Damage:
    try:
        count = sums_check(folder, remedy)
    except FileDamaged as damage:
        return _damage_of(what, kind, damage)
    except OSError as error:
        return Damage(what, kind, str(folder), "damaged", "", error.strerror or str(error), remedy)
    return Damage(what, kind, str(folder), "whole" if count else "unrecorded")


def _damage_of(what: str, kind: str, damage: FileDamaged) -> Damage:
    damage_notify(damage, what)
    state = "damaged" if damage.found else "missing"
    return Damage(what, kind, str(damage.path), state, damage.expected, damage.found, damage.remedy)
