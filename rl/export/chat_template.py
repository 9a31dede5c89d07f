"""A chat template as Ollama writes it: Jinja, as models carry it, translated to Go where that is shown to be right."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Turns = list[dict[str, str]]

_S, _U, _V, _W = "<<<system>>>", "<<<first>>>", "<<<answer>>>", "<<<second>>>"
_SYSTEM, _FIRST = {"role": "system", "content": _S}, {"role": "user", "content": _U}
_ANSWER, _SECOND = {"role": "assistant", "content": _V}, {"role": "user", "content": _W}
_SAMPLE_CHATS: tuple[Turns, ...] = (
    [_FIRST],
    [_SYSTEM, _FIRST],
    [_FIRST, _ANSWER, _SECOND],
    [_SYSTEM, _FIRST, _ANSWER, _SECOND],
    [
        _SYSTEM,
        _FIRST,
        _ANSWER,
        _SECOND,
        {"role": "assistant", "content": "a\nb"},
        {"role": "user", "content": "c"},
    ],
)


@dataclass(frozen=True)
class GoTemplate:
    """Texts around each turn, and Ollama's template made of them."""

    start: str
    role_markers: dict[str, tuple[str, str]]
    """Role -> what stands before and after its content."""
    answer: str
    """Tokens that begin an answer."""
    system: str
    """System turn for conversations that bring none; empty where there is none."""

    def render(self, turns: Turns) -> str:
        """Prompt that Ollama makes of a conversation that ends with the user's turn."""
        if self.system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system}, *turns]
        text = "".join(
            self.role_markers[turn["role"]][0] + turn["content"] + self.role_markers[turn["role"]][1]
            for turn in turns
        )
        return self.start + text + self.answer

    @property
    def text(self) -> str:
        """The template in Go's text/template over Ollama's `.Messages`."""
        roles = "".join(
            f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for number, (role, (before, after)) in enumerate(self.role_markers.items())
        )
        return f"{self.start}{{{{ range .Messages }}}}{roles}{{{{ end }}}}{{{{ end }}}}{self.answer}"

    @property
    def stop(self) -> list[str]:
        """Stop strings of an answer."""
        return [end] if (end := self.role_markers["assistant"][1].strip()) else []


def template_translated(jinja: str, bos: str, eos: str, *, bos_added: bool) -> GoTemplate | None:
    """A model's Jinja chat template for Ollama; None where turns are no plain blocks of text, one after the other.

    What stands around the turns is read off conversations with marks for contents; the translation counts only when
    it gives the same text as the original on conversations of one to six turns, with a system turn and without.
    bos_added: the model server writes `bos` itself, so the template must not.
    """
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.globals.update(
        raise_exception=_refuse, strftime_now=lambda form: datetime.date.today().strftime(form)
    )

    def render(turns: Turns, answer: bool = True) -> str:
        return template.render(messages=turns, add_generation_prompt=answer, bos_token=bos, eos_token=eos)

    try:
        template = sandbox.from_string(jinja)
        translation = _read_off(render, eos)
        if translation is None or any(translation.render(turns) != render(turns) for turns in _SAMPLE_CHATS):
            return None
    except (TemplateError, TypeError, KeyError, ValueError):
        return None  # it refuses a system turn, or reads what Ollama does not tell it
    if any(
        "{{" in text or "}}" in text
        for text in (translation.start, translation.answer, *sum(translation.role_markers.values(), ()))
    ):
        return None
    if bos and bos_added:
        before, after = translation.role_markers["system"]
        around = {
            **translation.role_markers,
            "system": (before.removeprefix(bos) if not translation.start else before, after),
        }
        translation = GoTemplate(
            translation.start.removeprefix(bos), around, translation.answer, translation.system
        )
    return translation


def _read_off(render: Any, eos: str) -> GoTemplate | None:
    open_end, invited = render([_FIRST], False), render([_FIRST])
    # some write the end of all text where nobody is invited to go on (Phi 3)
    closing = "" if invited.startswith(open_end) else eos
    open_end = open_end.removesuffix(closing)
    whole = render([_SYSTEM, _FIRST, _ANSWER, _SECOND])
    marks = [_S, _U, _V, _W]
    if not invited.startswith(open_end) or any(whole.count(mark) != 1 for mark in marks):
        return None
    answer = invited.removeprefix(open_end)
    pieces = []
    rest = whole
    for mark in marks:
        piece, _, rest = rest.partition(mark)
        pieces.append(piece)
    system_start, system_to_user, user_to_answer, answer_to_user = pieces
    user_after = open_end.partition(_U)[2]
    answer_after = render([_FIRST, _ANSWER], False).removesuffix(closing).partition(_V)[2]
    user_before = answer_to_user.removeprefix(answer_after)
    answer_before = user_to_answer.removeprefix(user_after)
    system_after = system_to_user.removesuffix(user_before)
    start = open_end.partition(_U)[0].removesuffix(user_before)
    default = ""
    if not system_start.startswith(start):
        # it says a system turn of its own where none is given
        default = start.removeprefix(system_start).removesuffix(system_after)
        start = ""
    return GoTemplate(
        start,
        {
            "system": (system_start.removeprefix(start), system_after),
            "user": (user_before, user_after),
            "assistant": (answer_before, answer_after),
        },
        answer,
        default,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
