"""The build of the bundled base model, on a tiny corpus."""

from statistics import median

import pytest

from rl.bundled_models import BUNDLED_MODEL
from tools.bundled_model.__main__ import main
from tools.bundled_model.model import CHAT_TEMPLATE, Shape, build_base_model


@pytest.fixture(scope="module")
def policy():
    from rl.training.policy import load_policy

    return load_policy("bundled")


def test_the_shipped_chat_template_is_the_builders():
    assert (BUNDLED_MODEL / "chat_template.jinja").read_text("utf-8") == CHAT_TEMPLATE


@pytest.mark.slow
def test_building_writes_a_model_that_loads(tmp_path):
    from rl.training.policy import generate, load_policy

    seen: list[tuple[int, int]] = []
    figures = build_base_model(
        tmp_path / "m",
        steps=2,
        batch_size=4,
        shape=Shape(layers=2),
        texts=2_500,
        progress=lambda s, n, loss: seen.append((s, n)),
    )
    assert seen == [(1, 2), (2, 2)]
    assert (figures["steps"], figures["vocabulary"]) == (2, 2560)
    assert figures["bytes"] == sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    loaded = load_policy(str(tmp_path / "m"))
    assert sum(p.numel() for p in loaded.model.parameters()) == figures["parameters"]
    (answer,) = generate(loaded, [[{"role": "user", "content": "hi"}]], max_new_tokens=2)
    assert answer.tokens <= 2


def test_building_refuses_no_steps(tmp_path):
    with pytest.raises(ValueError, match="expected at least 1, found 0 and 24"):
        build_base_model(tmp_path / "m", steps=0)
    assert not (tmp_path / "m").exists()


def test_training_starts_able_to_repeat(policy):
    """The drawn-in circuit: at the second of two equal lists, what followed before is expected again."""
    import torch
    from transformers import LlamaForCausalLM

    from tools.bundled_model.weights import weights_start

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(policy.model.config).eval()
        ids = torch.randperm(model.config.vocab_size)[:20].repeat(2)[None]
        ranks = []
        for start in (False, True):
            if start:
                weights_start(model)
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, 20:-1].float()
            following = logits.gather(1, ids[0, 21:, None])
            ranks.append(float((logits > following).float().sum(1).median()))
    assert ranks[0] > 300  # at random, of 2,560
    assert ranks[1] < 20


def test_training_starts_looking_at_what_is_listed(policy):
    """From a token that asks for a name, what stands behind the tokens that open names is expected, most of it."""
    import torch
    from transformers import LlamaForCausalLM

    from tools.bundled_model.weights import weights_start

    ranks: dict[bool, list[int]] = {False: [], True: []}
    with torch.random.fork_rng(devices=[]):
        for seed in range(4):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(policy.model.config).eval()
            ids = torch.randperm(model.config.vocab_size)[:24]
            opening, asking = ids[3].item(), ids[23].item()
            ids[[9, 15]] = opening
            for known, tokens in ((False, {}), (True, {"asking": [asking], "opening": [opening]})):
                weights_start(model, **tokens)
                with torch.no_grad():
                    logits = model(input_ids=ids[None]).logits[0, -1].float()
                ranks[known] += [int((logits > logits[ids[place + 1]]).sum()) for place in (3, 9, 15)]
    assert median(ranks[False]) > 300  # of 2,560
    assert median(ranks[True]) < 20


@pytest.mark.slow
def test_a_step_reads_the_same_whether_the_training_began_before_it_or_goes_on_with_it(policy):
    from tools.bundled_model.training import batches

    whole = list(batches(policy.tokenizer, 3, 2, start=0, steps=20))
    assert len(whole) == 20
    assert list(batches(policy.tokenizer, 3, 2, start=11, steps=20)) == whole[11:]
    assert list(batches(policy.tokenizer, 3, 2, start=16, steps=20)) == whole[16:]


def test_command_refuses_to_replace_a_model_unasked(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="--force"):
        main(["--output", str(tmp_path)])
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_command_builds_and_measures(tmp_path, monkeypatch, capsys):
    from tools.bundled_model import measure

    figures = {"prompts": 7, "valid_greedy": 0.5, "valid_sampled": 0.25}
    monkeypatch.setattr(measure, "base_model_measure", lambda path, seed: {"widgets": figures})
    main(["--output", str(tmp_path / "m"), "--steps", "1", "--batch-size", "2"])
    assert (tmp_path / "m" / "model.safetensors").is_file()
    assert "widgets: 50% valid greedy, 25% at temperature 1 (7 prompts)" in capsys.readouterr().out
