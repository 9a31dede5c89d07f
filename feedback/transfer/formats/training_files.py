"""Files that TRL and OpenAI fine-tune on: preferences, labels, demonstrations, prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from feedback.messages import Completion, Message
from feedback.transfer.formats.base import (
    FACTS,
    PROMPT_ALONE,
    UNLEARNT,
    TaughtPrompt,
    has,
    key_of,
    learnt_taken,
    part_of,
    reasoning_in,
    request_options,
    row_format,
    text_only,
    tools_of,
    verdicts_read,
)
from feedback.transfer.formats.cells import JsonObject, truth_of
from feedback.transfer.formats.columns import PAIR_PROMPTS, REJECTED, alias, normal, verdicts_in
from feedback.transfer.formats.records import (
    SYSTEM_COLUMNS,
    ImportedComparison,
    ImportedDecision,
    Record,
    RowError,
    RowLeftOut,
    RowSkipped,
    completion_of,
    messages_of,
    system_in,
    text_of,
    with_system,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    View,
    better_worse,
    each_rating,
    good,
    plain,
    question,
    shape,
    some_turns,
    some_words,
    tools_text,
    turns_of,
    words,
)

# --- TRL: preference, unpaired, prompt-completion and prompt-only rows -------------------------------------


def recognises(row: JsonObject) -> bool:
    """True of TRL's own columns. A row that states its prompt or a rejected response under another name is a table."""
    names = {form for name in row for form in (normal(str(name)), alias(normal(str(name))))}
    if ("prompt" not in row and names & PAIR_PROMPTS) or names & (REJECTED - {"rejected"}):
        return False
    if has(row, "chosen", "rejected"):
        alike = not has(row, "conversations") and not isinstance(row["chosen"], Mapping)
        return alike and not verdicts_in(row, used=("chosen", "rejected"))
    if "prompt" not in row or "rejected" in row or verdicts_in(row, used=("prompt", "completion", "label")):
        return False
    labelled = "label" not in row or truth_of(row["label"]) is not None
    return set(row) <= {"prompt", "tools", "system", "system_prompt", *FACTS} or (
        "completion" in row and labelled
    )


def records(row: JsonObject, line: int) -> Iterator[Record]:
    key, metadata = key_of(row), tools_of(row)
    text_only(row)
    verdicts_read(row, used=("chosen", "rejected", "label" if "completion" in row else ""))
    if has(row, "chosen", "rejected"):
        _prompt_unstated(row)
        messages, chosen, rejected = preference_parts(row)
        messages = with_system(system_in(row), messages, "prompt")
        yield TaughtPrompt(line, key, messages, metadata).preference(chosen, rejected)
        return
    messages = with_system(system_in(row), messages_of(row.get("prompt"), "prompt"), "prompt")
    if "completion" not in row:
        raise RowLeftOut(PROMPT_ALONE)
    completion = completion_of(row["completion"], "completion", required=True)
    taught = TaughtPrompt(line, key, messages, metadata, reasoning_in(row))
    labelled = "label" in row
    yield (
        taught.judgement(completion, row["label"], "label") if labelled else taught.demonstration(completion)
    )


def _prompt_unstated(row: JsonObject) -> None:
    """Raises RowError where the prompt would be cut out of two texts while another column may state it."""
    if isinstance(row["chosen"], list) or "prompt" in row or "messages" in row:
        return
    known = ("chosen", "rejected", "tools", *SYSTEM_COLUMNS)
    for name, value in row.items():
        if normal(name) not in known and isinstance(value, str) and len(value.split()) >= MIN_WORDS:
            raise RowError(
                f"{name}: may be the prompt, so the common beginning of chosen and rejected is not taken for it. Say "
                f"--map prompt={name},chosen=chosen,rejected=rejected, or leave it out with --map ignore={name}"
            )


MIN_WORDS = 4
"""Words of a text that may be a prompt rather than a name or a source."""


def preference_parts(row: JsonObject) -> tuple[list[Message], Completion, Completion]:
    """Prompt, chosen and rejected response of a row; where no prompt is given apart, what both begin with is it.

    Raises RowError.
    """
    chosen, rejected, prompt = (row.get(name) for name in ("chosen", "rejected", "prompt"))
    if prompt is None and _lacks_prompt(chosen) and isinstance(row.get("messages"), list):
        prompt = messages_of(row["messages"], "messages")
        if len(prompt) > 1 and prompt[-1]["role"] == "assistant":
            # the chosen conversation, as it stands beside chosen in files that train_sft may read too
            prompt = prompt[:-1]
    if prompt is not None:
        stated = messages_of(prompt, "prompt")
        return (
            stated,
            completion_of(_after(stated, chosen, "chosen"), "chosen", required=True),
            completion_of(_after(stated, rejected, "rejected"), "rejected"),
        )
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise RowError("chosen and rejected: expected two texts or two lists of messages, found one of each")
    if isinstance(chosen, list):
        return _shared_turns(messages_of(chosen, "chosen"), messages_of(rejected, "rejected"))
    return _shared_text(text_of(chosen, "chosen"), text_of(rejected, "rejected"))


def _after(prompt: list[Message], response: object, what: str) -> object:
    """A response without the prompt that is repeated in front of it: whole, or (as ultrafeedback_binarized has it) its
    last turns. Raises RowError for a conversation about something else."""
    if not isinstance(response, list):
        return response
    turns = messages_of(response, what)
    if turns[0]["role"] == "assistant":
        return turns
    own = next((n for n in range(len(turns), 0, -1) if turns[n - 1]["role"] in ("user", "system")), 0)
    repeated, answer = turns[:own], turns[own:]
    if not answer:
        raise RowError(f"{what}: expected a conversation that ends with the assistant's turn")
    spoken = [message for message in prompt if message["role"] != "system"]
    if repeated not in (prompt[-len(repeated) :], spoken[-len(repeated) :]):
        raise RowError(f"{what}: its turns before the response are not those of the prompt")
    return answer


def _lacks_prompt(chosen: object) -> bool:
    """True of a chosen response without its prompt: a text, or messages that begin with the assistant's."""
    if isinstance(chosen, list):
        return bool(chosen) and isinstance(chosen[0], Mapping) and chosen[0].get("role") == "assistant"
    return isinstance(chosen, str)


def _shared_turns(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], Completion, Completion]:
    """The turns two conversations begin with are the prompt (trl.data_utils.extract_prompt)."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise RowError("chosen and rejected are the same conversation: no preference")
    if shared == 0:
        raise RowError("chosen and rejected share no turn: no prompt to answer")
    if not chosen[shared:] or not rejected[shared:]:
        raise RowError("one conversation is the beginning of the other: one response is empty")
    if chosen[shared]["role"] in ("user", "system") or rejected[shared]["role"] in ("user", "system"):
        raise RowError(
            f"the conversations differ before the response, in turn {shared + 1}: not the same prompt"
        )
    return (
        chosen[:shared],
        completion_of(chosen[shared:], "chosen", required=True),
        completion_of(rejected[shared:], "rejected"),
    )


def _shared_text(chosen: str, rejected: str) -> tuple[list[Message], Completion, Completion]:
    """The text two texts begin with is the prompt; a space before the difference belongs to the responses
    (trl.data_utils.extract_prompt)."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise RowError("chosen and rejected are the same text: no preference")
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    if not chosen[:shared].strip():
        raise RowError("chosen and rejected have no common beginning: no prompt to answer")
    return (
        messages_of(chosen[:shared], "prompt"),
        completion_of(chosen[shared:], "chosen", required=True),
        completion_of(rejected[shared:], "rejected"),
    )


# --- Writing -----------------------------------------------------------------------------------------------


def _pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    yield {
        "prompt": plain(better.messages),
        "chosen": some_turns(better.response),
        "rejected": turns_of(worse.response),
        **tools_text(better),
    }


def _implicit_pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    for line in _pair(record, left_out):
        if line["chosen"][0] == line["rejected"][0]:
            raise NotSaid("same_beginning")
        prompt = line.pop("prompt")
        yield line | {"chosen": prompt + line["chosen"], "rejected": prompt + line["rejected"]}


def _text_pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    yield {
        "prompt": question(better.messages),
        "chosen": some_words(better.response),
        "rejected": words(worse.response),
    }


def _implicit_text_pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    for line in _text_pair(record, left_out):
        prompt = line["prompt"] + "\n"
        if line["chosen"][:1] == line["rejected"][:1]:
            raise NotSaid("same_beginning")
        yield {"chosen": prompt + line["chosen"], "rejected": prompt + line["rejected"]}


def _labels(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A row for each rating that says good or bad."""
    row = {"prompt": plain(record.messages), "completion": some_turns(record.response)}
    tools = tools_text(record)
    return each_rating(record, left_out, lambda rating: {**row, "label": good(rating), **tools})


def _completion(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    yield {
        "prompt": plain(record.messages),
        "completion": some_turns(record.response),
        **tools_text(record),
    }


def _prompt(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    yield {"prompt": plain(record.messages), **tools_text(record)}


SHAPES = (
    shape("trl", "preference, conversational, explicit prompt", View.PREFERENCES, _pair),
    shape("trl-implicit", "preference, conversational, implicit prompt", View.PREFERENCES, _implicit_pair),
    shape("trl-standard", "preference, texts, explicit prompt", View.PREFERENCES, _text_pair),
    shape(
        "trl-standard-implicit", "preference, texts, implicit prompt", View.PREFERENCES, _implicit_text_pair
    ),
    shape("trl-unpaired", "unpaired: a label for each rating", View.RATED, _labels),
    shape("trl-prompt-completion", "prompt and completion", View.DEMONSTRATIONS, _completion),
    shape("trl-prompt-only", "prompts", View.PROMPTS, _prompt),
)

TRL = row_format(
    "trl", "TRL preference, unpaired, prompt-completion and prompt-only rows", recognises, records, SHAPES
)


# --- OpenAI: chat SFT (`messages`) and DPO (`input`, `preferred_output`) -----------------------------------

OPENAI_ANSWERS = {"response", "completion", "answer", "output", "chosen", "rejected"}


def _is_openai(row: JsonObject) -> bool:
    if has(row, "input", "preferred_output", "non_preferred_output"):
        return True
    # an answer beside the messages makes them its prompt, and what looks like a verdict must not be passed over
    return isinstance(row.get("messages") or row.get("contents"), list) and not (
        OPENAI_ANSWERS & set(row)
        or REJECTED & {normal(str(name)) for name in row}
        or verdicts_in(row, used=("messages", "contents"))
    )


def _openai(row: JsonObject, line: int) -> Iterator[Record]:
    key = key_of(row)
    if "preferred_output" in row:
        request_body = part_of(row, "input")
        messages = with_system(system_in(row), messages_of(request_body, "input"), "input")
        metadata = {**tools_of(request_body, "input.tools"), **request_options(request_body)}
        yield TaughtPrompt(line, key, messages, metadata).preference(
            completion_of(row["preferred_output"], "preferred_output", required=True),
            completion_of(row.get("non_preferred_output"), "non_preferred_output"),
        )
        return
    text_only(row)
    verdicts_read(row)
    name = "messages" if "messages" in row else "contents"
    messages = with_system(system_in(row), messages_of(row.get(name), name), name)
    metadata = {**tools_of(row), **request_options(row)}
    learnt = [learnt_taken(message) for message in messages]
    found = False
    for index, message in enumerate(messages):
        # every assistant turn that counts is a response of its own to what stands before it; a weight of 0 means
        # that it is only there to be read
        if message["role"] == "assistant" and learnt[index] and index and _says(message):
            found = True
            response = completion_of([message], f"{name}[{index}]", required=True)
            yield TaughtPrompt(line, key, messages[:index], metadata).demonstration(response)
    if not found:
        yield RowSkipped(line, key, UNLEARNT)


def _says(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("refusal"))


# --- Writing -----------------------------------------------------------------------------------------------


def _openai_pair(record: ImportedComparison, left_out: Counter[str]) -> Iterator[Line]:
    better, worse = better_worse(record)
    input_line: Line = {"messages": plain(better.messages), "tools": better.metadata.get("tools") or []}
    yield {
        "input": input_line | {"parallel_tool_calls": True},
        "preferred_output": some_turns(better.response),
        "non_preferred_output": turns_of(worse.response),
    }


def _chat(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """The whole conversation, of which the response alone is to be learnt."""
    response = some_turns(record.response)
    if len(response) > 1:
        raise NotSaid("not_text")  # read again, several turns would be as many responses
    before = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in plain(record.messages)]
    tools = record.metadata.get("tools")
    yield {
        "messages": [*before, {**response[0], "weight": 1}],
        **({"tools": tools} if tools else {}),
    }


OPENAI_SHAPES = (
    shape("openai", "DPO: preferred and non-preferred output", View.PREFERENCES, _openai_pair),
    shape("openai-sft", "SFT: chats whose last answer is learnt", View.DEMONSTRATIONS, _chat),
)

OPENAI = row_format(
    "openai",
    "OpenAI chat SFT and DPO",
    _is_openai,
    _openai,
    OPENAI_SHAPES,
    verdicts=("preferred_output", "non_preferred_output"),
)
