"""Write the diagrams of docs/architecture.md, the way of a thumb and of a chat completion: python docs/diagrams.py"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
COLUMNS = 4
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 250, 104, 34, 46, 40


@dataclass(frozen=True)
class Step:
    """One step: what happens, the module that does it, and what it leaves for the next one."""

    title: str
    module: str
    leaves: str


THUMB = (
    Step("A thumb", "feedback.rating, feedback.api", "a validated form or request"),
    Step("The rating is stored", "feedback.services", "a Rating row, never changed"),
    Step("The buffer is full", "rl.online.learner", "a queued TrainingRun"),
    Step("A dataset is made", "rl.datasets.builder", "a snapshot: file, hash, counts"),
    Step("A worker claims the run", "rl.jobs.lifecycle", "a child process, one per device"),
    Step("A policy is trained", "rl.jobs.train -> rl.training", "adapter.safetensors, result.json"),
    Step("It is registered", "rl.registry.service", "a Policy, stage candidate"),
    Step("It is evaluated", "rl.evaluation.service", "an Evaluation on held-out prompts"),
    Step("The gate checks it", "rl.gates.rules", "a gate report: passed or rejected"),
    Step("It is promoted", "rl.registry, rl.experiments", "challenger or champion"),
    Step("It answers users", "rl.serving.gateway", "a Decision: policy, propensity"),
    Step("People rate its answers", "feedback.rating.queue", "the next thumb"),
)
COMPLETION = (
    Step("An app asks", "rl.api.gateway", "POST /v1/chat/completions, a key"),
    Step("The request is parsed", "rl.serving.chat_request", "a ChatRequest, or a 400 at once"),
    Step("A policy is chosen", "rl.serving.routing", "agent, arm, policy, fallbacks"),
    Step("A backend answers", "rl.serving.fallback", "text, tokens, probability"),
    Step("The decision is journaled", "ratchet_client.outbox", "a row in a file, before the answer"),
    Step("The app gets the answer", "rl.api.gateway", "its id is the decision's"),
    Step("The decision is stored", "feedback.recording.recorder", "Decision rows, in batches"),
    Step("A rating of it arrives", "feedback.services", "the way of a thumb begins"),
)

STYLE = """
  .page { fill: #fbfaf7; stroke: #e4dfd3 } .box { fill: #ffffff; stroke: #c8d3de } .line { stroke: #5b6b7c; fill: none }
  .tip { fill: #5b6b7c } .title { fill: #1d2733; font-weight: 600; font-size: 16px }
  .module { fill: #2b5f8a; font-size: 12.5px; font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
  .leaves { fill: #55606c; font-size: 13px }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d; stroke: #2b333c } .box { fill: #1d242c; stroke: #3d4956 } .line { stroke: #93a3b3 }
    .tip { fill: #93a3b3 } .title { fill: #eef2f6 } .module { fill: #8fc1ec } .leaves { fill: #b3bfca }
  }
"""


def place(number: int) -> tuple[int, int]:
    """Upper left corner of a step's box: rows run to the right and back again in turn."""
    row, column = divmod(number, COLUMNS)
    if row % 2:
        column = COLUMNS - 1 - column
    return MARGIN + column * (WIDTH + GAP_X), MARGIN + row * (HEIGHT + GAP_Y)


def box(number: int, step: Step) -> str:
    x, y = place(number)
    middle = x + WIDTH / 2
    lines = [("title", step.title, 34), ("module", step.module, 60), ("leaves", step.leaves, 84)]
    texts = "".join(
        f'<text class="{kind}" x="{middle:g}" y="{y + down}" text-anchor="middle">{escape(text)}</text>'
        for kind, text, down in lines
    )
    return f'<rect class="box" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="12"/>{texts}'


def arrow(number: int) -> str:
    """From a step to the next one: sideways within a row, down at its end."""
    (x, y), (to_x, to_y) = place(number), place(number + 1)
    if to_y != y:
        start, end = (x + WIDTH / 2, y + HEIGHT), (to_x + WIDTH / 2, to_y - 4)
    elif to_x > x:
        start, end = (x + WIDTH, y + HEIGHT / 2), (to_x - 4, to_y + HEIGHT / 2)
    else:
        start, end = (x, y + HEIGHT / 2), (to_x + WIDTH + 4, to_y + HEIGHT / 2)
    return f'<path class="line" d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}" marker-end="url(#tip)"/>'


def back(steps: int) -> str:
    """A dashed line from below the last step around to the first: the loop goes on."""
    x, y = place(steps - 1)
    first_x, first_y = place(0)
    low, left = y + HEIGHT + 18, first_x - 18
    down = f"M{x + WIDTH / 2:g} {y + HEIGHT}V{low}H{left}V{first_y + HEIGHT / 2:g}H{first_x - 4}"
    return f'<path class="line" stroke-dasharray="5 5" d="{down}" marker-end="url(#tip)"/>'


def svg(label: str, steps: tuple[Step, ...], *, loop: bool) -> str:
    """The whole picture; its colours follow the reader's preference for light or dark."""
    rows = -(-len(steps) // COLUMNS)
    width = 2 * MARGIN + COLUMNS * WIDTH + (COLUMNS - 1) * GAP_X
    height = 2 * MARGIN + rows * HEIGHT + (rows - 1) * GAP_Y
    parts = [box(number, step) for number, step in enumerate(steps)]
    parts += [arrow(number) for number in range(len(steps) - 1)]
    if loop:
        parts.append(back(len(steps)))
    told = f"{label}: " + "; ".join(f"{step.title} ({step.module}): {step.leaves}" for step in steps)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(told, quote=True)}" font-family="system-ui, -apple-system, Segoe UI, sans-serif">\n'
        f"<style>{STYLE}</style>\n"
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>\n'
        f'<rect class="page" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="18"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def pictures() -> dict[str, str]:
    """File name -> content of every picture."""
    return {
        "way-of-a-thumb.svg": svg("The way of a thumb", THUMB, loop=True),
        "way-of-a-completion.svg": svg("The way of a chat completion", COMPLETION, loop=False),
    }


def main() -> None:
    for name, content in pictures().items():
        (IMAGES / name).write_text(content, "utf-8")
        sys.stdout.write(f"{IMAGES / name}\n")


if __name__ == "__main__":
    main()
