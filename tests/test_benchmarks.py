"""Benchmarks of trained models: tasks read, policy and base on the same items, results kept, shown, gated."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.exceptions import ValidationError
from django.core.management.base import CommandError
from django.test import Client

from rl.evaluation.benchmarks import figures_paired
from rl.gates.answers import rule_benchmarks
from rl.gates.report import NOT_APPLICABLE, BenchmarkCases, Case, Evidence, GateBounds, GateError, RuleResult
from rl.models import BenchmarkResult, GateSettings, Policy, TrainingRun
from rl.recipes.benchmark_tasks import TaskRefused, bundled_names, listed_option, task_folder
from rl.registry import gate_evidence
from rl.registry import service as registry
from rl.registry.gate_evidence import benchmarks_newest
from rl.registry.integrity import adapter_folder
from rl.registry.model_card import policy_card
from tests.support.evaluations import judged
from tests.support.said import printed
from tests.support.tiny_models import tiny_adapter, tiny_model

pytestmark = pytest.mark.django_db

WORDS = ["a9", "b8", "c7", "d6", "f5", "g4"]


def task_written(folder: Path, rows: list[dict[str, Any]] | None = None, **config: Any) -> Path:
    """A task folder: which of six words follows, by likelihood; `config` replaces keys."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows or [{"q": f"{WORDS[n]} {n}:", "c": WORDS, "a": n} for n in range(6)]
    given = {
        "task": folder.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{c}}",
        "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 3},
        **config,
    }
    (folder / "task.yaml").write_text(yaml.safe_dump({k: v for k, v in given.items() if v is not None}))
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random base and an adapter that damages it."""
    folder = tmp_path_factory.mktemp("benchmarked")
    base = tiny_model(folder / "base")
    return base, tiny_adapter(base, folder / "adapter", lora_alpha=256)


def registered(home: Path, base: Path | str, adapter: Path | None, kind: str = "adapter") -> Policy:
    """A policy of the registry whose adapter's files lie in its own folder."""
    run = TrainingRun.objects.create(agent="widgets", method="dpo", base_model=str(base))
    place = home / "policies" / "widgets" / "widgets-v9"
    if adapter is not None:
        shutil.copytree(adapter, place)
    policy = registry.policy_register(
        run, name="widgets-v9", adapter=place, adapter_sha256="", feedback_count=9, actor="test", kind=kind
    )
    policy.refresh_from_db()
    return policy


def run_command(*arguments: str) -> dict[str, Any]:
    out = printed("benchmark_model", *arguments, "--json")
    (line,) = out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_the_bundled_tasks_are_read_and_have_one_right_answer_each() -> None:
    assert bundled_names() == ["ratchet_format", "ratchet_options"]
    options = task_folder("ratchet_options")
    assert (options.source, options.version, len(options.items["test"])) == ("bundled", "1.0", 120)
    for row in options.items["test"]:
        listed = row["prompt"].partition("s:\n")[2].splitlines()
        named = [json.loads(choice)["choice"] in listed for choice in row["choices"]]
        assert [place for place, right in enumerate(named) if right] == [row["label"]]


def test_a_listed_option_is_one_key_and_nothing_else() -> None:
    assert listed_option('{"folder": "a b"}', ["a b", "c"])
    for text in (
        '{"folder": "a"}',
        "a b",
        '{"x": "c", "y": "c"}',
        '{"folder": "c"} indeed',
        '["c"]',
        '{"x": ["c"]}',
    ):
        assert not listed_option(text, ["a b", "c"]), text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"class": "x.Y"}, "names Python code"),
        ({"include": "other.yaml"}, "one whole configuration"),
        ({"unsafe_code": True}, "in the sandbox"),
        ({"process_results": "own.score"}, "process_results must be one of"),
        ({"metric_list": [{"metric": "rouge", "hf_evaluate": True}]}, "hf_evaluate"),
        ({"dataset_path": "openai/gsm8k"}, "expected `dataset_path: json`"),
        ({"dataset_kwargs": {"data_files": {"test": "../task.yaml"}}}, "beside it"),
        ({"test_split": "validation"}, "data_files has test"),
    ],
)
def test_a_task_that_runs_code_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskRefused, match=words):
        task_folder(str(task_written(tmp_path / "mine", **config)))


def test_tags_and_hashes(tmp_path: Path) -> None:
    # a function tag is refused and not run
    folder = task_written(tmp_path / "mine")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with (folder / "task.yaml").open("a") as file:
        file.write("process_docs: !function own.x\n")
    with pytest.raises(TaskRefused, match="none is run from a task folder"):
        task_folder(str(folder))
    assert not (tmp_path / "ran").exists()
    # the hash changes with an item
    before = task_folder(str(task_written(tmp_path / "mine")))
    with (tmp_path / "mine" / "items.jsonl").open("a") as file:
        file.write('{"q": "word 7:", "c": ["up", "in"], "a": 0}\n')
    assert before.sha256 != task_folder(str(tmp_path / "mine" / "task.yaml")).sha256


@pytest.mark.slow
def test_policy_and_base_are_scored_on_the_same_items_and_kept(
    ratchet_home: Path,
    tmp_path: Path,
    files: tuple[Path, Path],
    admin_client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # in bfloat16 two words that are as likely come out either way, by how many were computed together
    monkeypatch.setattr("rl.training.hardware._cpu_dtype", lambda *_: ("float32", "of a test"))
    policy = registered(ratchet_home, *files)
    Policy.objects.update(adapter_sha256=registry_sum(policy))
    folder = task_written(tmp_path / "words")
    found = run_command("--policy", policy.name, "--tasks", f"{folder}, ratchet_format", "--limit", "5")
    words, form = found["benchmarks"]
    assert (words["task"], words["n"], words["metric"], words["version"]) == ("words", 5, "acc", "3")
    assert (words["source"], words["stale"], words["limit"]) == ("folder", "", 5)
    assert words["harness"].startswith("lm-eval 0.4")
    assert (form["task"], form["own"]["value"], form["base"]["value"]) == ("ratchet_format", 0.0, 0.0)
    # the same by the formula that training and evaluation use
    row = BenchmarkResult.objects.get(task="words")
    assert row.items["own"] == likelier(policy, folder, adapter=True)
    assert row.items["base"] == likelier(policy, folder, adapter=False)
    assert row.items["own"] != row.items["base"]
    assert words["own"]["value"] == sum(row.items["own"]) / 5
    assert str(tmp_path) not in json.dumps(words)
    assert policy.events.first().kind == "benchmarked"  # type: ignore[union-attr]
    assert "words (acc): " in (adapter_folder(policy) / "README.md").read_text("utf-8")
    page = admin_client.get(f"/policies/{policy.name}/").content.decode()
    assert "Points ahead of the base on the same items" in page
    assert found["next"].startswith("see /policies/")


def registry_sum(policy: Policy) -> str:
    from rl.checksums import file_sum
    from rl.registry.service import home_path

    return file_sum(home_path(policy.adapter_path) / "adapter_model.safetensors")


def likelier(policy: Policy, folder: Path, *, adapter: bool) -> list[float]:
    """1 where the right word is the likeliest, by plain log-probabilities of text and words."""
    import torch

    from rl.training.policy import load_policy

    loaded = load_policy(policy.base_model, adapter_folder(policy))
    rows = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()][:5]

    def logp(prompt: str, answer: str) -> float:
        given, whole = (
            loaded.tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, prompt + answer)
        )
        assert whole[: len(given)] == given
        with torch.inference_mode():
            table = torch.log_softmax(loaded.model(torch.tensor([whole])).logits[0, :-1].float(), -1)
        return float(sum(table[place - 1, whole[place]] for place in range(len(given), len(whole))))

    found = []
    for row in rows:
        prompt = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": row["q"]}], tokenize=False, add_generation_prompt=True
        )
        scores: list[float] = []
        for word in row["c"]:
            if adapter:
                scores.append(logp(prompt, word))
            else:
                with loaded.without_adapter():
                    scores.append(logp(prompt, word))
        found.append(float(scores.index(max(scores)) == row["a"]))
    return found


CODE = {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": ""}
CODE |= {"process_results": "code_execution", "generation_kwargs": {"until": [], "max_gen_toks": 4}}
CODE |= {"metric_list": [{"metric": "passed", "aggregation": "mean", "higher_is_better": True}]}


@pytest.mark.slow
def test_code_is_run_in_our_sandbox_or_not_at_all(
    ratchet_home: Path,
    tmp_path: Path,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> None:
    policy = registered(ratchet_home, *files)
    Policy.objects.update(adapter_sha256=registry_sum(policy))
    tests = [{"call": "double(3)", "expected": 6}, {"call": "double(0)", "expected": 1}]
    folder = task_written(tmp_path / "code", [{"q": "Write double(x).", "tests": tests}], **CODE)
    with pytest.raises(CommandError, match="ENABLE_CODE_EXECUTION"):
        run_command("--policy", policy.name, "--tasks", str(folder))
    settings.ENABLE_CODE_EXECUTION = True
    from rl.training import benchmark

    monkeypatch.setattr(
        benchmark.HarnessModel,
        "generate_until",
        lambda self, requests, disable_tqdm=False: (
            ["```python\ndef double(x): return 2 * x\n```"] * len(requests)
        ),
    )
    found = run_command("--policy", policy.name, "--tasks", str(folder))
    assert found["benchmarks"][0]["own"] == {"value": 0.5, "stderr": 0.0}  # one of two tests


@pytest.mark.slow
def test_what_to_do_is_said(ratchet_home: Path, tmp_path: Path, files: tuple[Path, Path]) -> None:
    policy = registered(ratchet_home, *files)
    Policy.objects.update(adapter_sha256=registry_sum(policy))
    hostile = task_written(tmp_path / "hostile", doc_to_text="{{q.__class__.__mro__[1].__subclasses__()}}")
    with pytest.raises(CommandError, match=r"hostile: .*(unsafe|may not)"):
        run_command("--policy", policy.name, "--tasks", str(hostile))
    perplexity = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    corpus = task_written(
        tmp_path / "corpus", output_type="loglikelihood", doc_to_choice=None, metric_list=perplexity
    )
    with pytest.raises(CommandError, match="cannot be paired"):
        run_command("--policy", policy.name, "--tasks", str(corpus))
    with pytest.raises(CommandError, match="found none"):
        run_command("--policy", policy.name, "--tasks", "./nowhere/task.yaml")
    assert not BenchmarkResult.objects.exists()


def test_a_linear_policy_is_told_that_benchmarks_do_not_apply(ratchet_home: Path, tmp_path: Path) -> None:
    policy = registered(ratchet_home, "", None, kind="linear")
    with pytest.raises(CommandError, match="no language model"):
        run_command("--policy", policy.name, "--tasks", "ratchet_format")
    assert "no language model" in policy_card(policy)
    GateSettings.objects.create(agent="widgets", benchmarks="ratchet_format")
    judged(policy)
    report = gate_evidence.policy_judge(policy)
    assert [v.outcome for v in report.verdicts if v.rule == "benchmarks"] == [NOT_APPLICABLE]


def test_figures_are_those_of_the_textbook() -> None:
    found = figures_paired([1, 1, 1, 0], [1, 0, 0, 0])
    assert found["own"] == {"value": 0.75, "stderr": pytest.approx(0.25)}  # sqrt(0.75 * 0.25 * 4 / 3 / 4)
    assert found["base"]["value"] == 0.25
    assert found["difference"]["value"] == 0.5
    assert found["difference"]["low"] < 0.5 < found["difference"]["high"]
    shares = figures_paired([0.5, 1.0], [0.0, 0.5])
    assert [shares["difference"][part] for part in ("value", "low", "high")] == pytest.approx([0.5] * 3)


def asked(wins: int, losses: int, alike: int, *, listed: str = "words", **more: Any) -> RuleResult:
    cases = [Case(1, 0)] * wins + [Case(0, 1)] * losses + [Case(1, 1)] * alike
    found = Evidence("base", (), benchmarks={"words": BenchmarkCases("acc", cases)}, **more)
    return rule_benchmarks(found, GateBounds(benchmarks=listed), "champion")


@pytest.mark.parametrize(
    ("wins", "losses", "alike", "passed", "waits"),
    [
        (5, 5, 190, True, False),
        (0, 4, 196, True, False),  # 2 points lost, no chance, and within the bound
        (5, 5, 30, False, True),  # as good, but 40 items rule nothing out
        (0, 9, 191, False, True),  # 4.5 points: 5 are not ruled out
        (0, 40, 160, False, False),  # 20 points: surely more than 5
    ],
)
def test_a_loss_is_ruled_out(wins: int, losses: int, alike: int, passed: bool, waits: bool) -> None:
    found = asked(wins, losses, alike)
    assert (found.passed, found.waits) == (passed, waits), found.words


def test_a_task_may_have_a_bound_of_its_own() -> None:
    assert not asked(0, 4, 196, listed="words=0.01").passed
    assert asked(0, 9, 191, listed="words=0.1").passed
    for bad in ("words=much", "words=2", "=0.1"):
        with pytest.raises(GateError, match="benchmarks: expected names of tasks"):
            GateBounds(benchmarks=bad)
        with pytest.raises(ValidationError):
            GateSettings(agent="widgets", benchmarks=bad).clean()


def test_the_gate_asks_for_listed_tasks(ratchet_home: Path, tmp_path: Path, files: tuple[Path, Path]) -> None:
    policy = registered(ratchet_home, *files)
    judged(policy)
    report = gate_evidence.policy_judge(policy)
    assert report.passed
    assert "benchmarks" not in [verdict.rule for verdict in report.verdicts]
    folder = task_written(tmp_path / "words")
    GateSettings.objects.create(agent="widgets", benchmarks="words")
    task = task_folder(str(folder))
    assert task is not None
    reasons = []
    for wanted in ("missing", "good", "stale"):
        if wanted == "good":
            result_stored(policy, str(folder), task.sha256, [1.0] * 200)
        if wanted == "stale":
            (folder / "items.jsonl").write_text('{"q": "word:", "c": ["up", "in"], "a": 0}\n')
        report = gate_evidence.policy_judge(policy)
        reasons.append(report.reason)
        assert not report.harmful
    assert "`python manage.py benchmark_model --policy widgets-v9 --tasks words`" in reasons[0]
    assert reasons[1] == ""
    assert reasons[2].startswith("the task words has changed since it was run (")
    assert reasons[2].endswith(f"--tasks {folder}`")
    with pytest.raises(registry.RegistryRefused, match="has changed since"):
        registry.policy_promote(policy, actor="test")
    result_stored(policy, "bundled", "0" * 64, [0.0] * 200, task="ratchet_format")
    assert [one.task for one in benchmarks_newest(policy)] == ["ratchet_format", "words"]


def result_stored(policy: Policy, source: str, sha256: str, own: list[float], task: str = "words") -> None:
    base = [1.0] * len(own)
    BenchmarkResult.objects.create(
        policy=policy,
        task=task,
        source=source,
        task_sha256=sha256,
        harness="lm-eval 0",
        metric="acc",
        chat_template=True,
        n=len(own),
        figures=figures_paired(own, base),
        base_model_hash="",
        seconds=1.0,
        items={"hash": [""] * len(own), "own": own, "base": base},
    )
