"""The next step after each command: its last line, and `next` in --json."""

from __future__ import annotations

from pathlib import Path

from backend.installation import PROGRAM


def after_training(policy: str, champion: str = "") -> str:
    """champion: the policy to beat; empty for the base model."""
    return f"{PROGRAM} evaluate_model --policy {policy} {f'--compare {champion}' if champion else '--compare-base'}"


def after_reward_model(agent: str, run: int) -> str:
    return f"{PROGRAM} train_ppo --agent {agent} --reward model:{run}"


def after_gate_opens(policy: str) -> str:
    return f"{PROGRAM} policy promote {policy}"


def after_gate_stays_closed(agent: str, further: int = 0) -> str:
    """further: prompts to rate until enough are held out."""
    more = f"about {further} more prompts" if further else "more prompts"
    return f"rate {more} at /rate/?agent={agent}, then train again"


def after_harm(policy: str, agent: str, reason: str) -> str:
    return (
        f"it did not pass the gate ({reason}): train again with other knobs (--learning-rate, --epochs) or "
        f"more ratings (/rate/?agent={agent}); to promote it anyway, on record: {PROGRAM} policy promote "
        f"{policy} --force --reason WHY"
    )


def after_rejection(agent: str, reason: str) -> str:
    return (
        f"it did not pass the gate ({reason}) and is rejected: train a new one with other knobs (--learning-rate, "
        f"--epochs) or more ratings (/rate/?agent={agent})"
    )


def after_challenge(policy: str, agent: str) -> str:
    return f"{PROGRAM} experiment start {policy} --agent {agent} --challenger {policy}"


def after_promotion(policy: str, agent: str, kind: str = "adapter") -> str:
    if kind == "recorded":
        return f"have the app ask its own model again: this server answers for {agent} with the base model"
    form = "" if kind == "linear" else " --format gguf --quantization q4_k_m"
    return (
        f'ask it: POST /v1/chat/completions with "model": "{agent}" (make serve, docs/gateway.md); or export it '
        f"for another server: {PROGRAM} export_model --policy {policy}{form}"
    )


def after_export(format: str, path: str, base: str = "BASE.gguf") -> str:
    where = Path(path)
    folder = where if not where.suffix else where.parent
    return {
        "gguf": f"llama-server -m {path} --port 8080   (or export again with --register, for Ollama)",
        "gguf-lora": f"llama-server -m {base} --lora {path} --port 8080",
        "merged": f"python -m rl.checksums {folder} && vllm serve {folder}   (or another program)",
        "lora": f"peft.PeftModel.from_pretrained(base_model, '{folder}')   (or vllm serve BASE --enable-lora)",
        "linear": f"python -m json.tool {path}   (docs/linear.md explains the file)",
        "onnx": f"rl.export.onnx.session_open('{folder}')   (or onnxruntime.InferenceSession('{path}'))",
    }.get(format, "docs/export.md names programs that read it")


def after_benchmark(policy: str, agent: str, *, asked: bool) -> str:
    """asked: the agent's gate requires these tasks."""
    if asked:
        return f"{PROGRAM} policy promote {policy}"
    return (
        f"see /policies/{policy}/; to make the gate require these tasks, list them for {agent} at "
        "/admin/rl/gatesettings/ (benchmarks)"
    )
