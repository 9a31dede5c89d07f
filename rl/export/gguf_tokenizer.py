"""A transformers tokenizer as GGUF: tokens, types, merges or scores, pre-tokenizer, special tokens, chat template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
from jinja2 import TemplateError

from rl.export.artifact import ExportRefused
from rl.training.encoding import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Pre-tokenizers of tokenizer.json and their names in llama.cpp. Where llama.cpp has two names for one
# pattern, one takes a word that is a token whole (tokenizer.json's ignore_merges), the other merges its pieces.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _letter_case(ending: str) -> str:
    return f"{_LEAD}{_UPPER}*{_LOWER}+{ending}|{_LEAD}{_UPPER}+{_LOWER}*{ending}|"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"

PRE_TOKENIZERS: dict[tuple[str, ...], dict[bool, str]] = {
    (_GPT2,): {False: "gpt-2"},
    (_DIGITS, _GPT2): {False: "smollm"},
    (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _TAIL,): {True: "llama-bpe", False: "smaug-bpe"},
    (_CONTRACTIONS + _WORDS + r"\p{N}" + _TAIL,): {False: "qwen2"},
    (_letter_case("") + r"\p{N}" + _SLASH_TAIL,): {True: "tekken"},
    (_letter_case(_CONTRACTIONS + "?") + r"\p{N}{1,3}" + _SLASH_TAIL,): {False: "gpt-4o"},
}
"""Patterns that split text, in order -> (whole words that are tokens stay whole -> llama.cpp's name)."""


@dataclass
class Vocabulary:
    """A tokenizer in GGUF's terms. `model` is `gpt2` (byte-level BPE) or `llama` (sentencepiece BPE)."""

    model: str
    pre: str
    tokens: list[str]
    types: list[gguf.TokenType]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    add_space_prefix: bool | None = None
    add_bos: bool = False
    add_eos: bool = False
    special: dict[str, int] = field(default_factory=dict)
    """bos, eos, eot, unk, pad -> token id."""
    chat_template: str | list[dict[str, str]] = ""
    """The template, or a list of several with their names."""
    strips_after_special: bool = False
    """True if white space after a special token is dropped (Phi-3), which llama.cpp does for models named phi-3."""
    notes: list[str] = field(default_factory=list)

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.add_space_prefix is not None:
            writer.add_add_space_prefix(self.add_space_prefix)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        adders: dict[str, Callable[[int], None]] = {
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "eot": writer.add_eot_token_id,
            "unk": writer.add_unk_token_id,
            "pad": writer.add_pad_token_id,
        }
        for name, token in self.special.items():
            adders[name](token)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, rows: int, system_prompt: str | None = None
) -> Vocabulary:
    """A fast tokenizer in GGUF's terms, for an embedding table with `rows` rows.

    It is read as transformers uses it, which may differ from its tokenizer.json. system_prompt: first turn of the chat
    template for conversations without a system turn. Raises ExportRefused for a tokenizer that llama.cpp lacks.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ExportRefused(
            f"expected a fast tokenizer (tokenizer.json), found {type(tokenizer).__name__}; save the model's tokenizer "
            "with transformers as a fast one first"
        )
    facts = json.loads(backend.to_str())
    model = facts["model"]
    if model.get("type") != "BPE":
        raise ExportRefused(
            f"expected a BPE tokenizer, found {model.get('type')}; llama.cpp's kinds here are BPE ones"
        )
    size = (
        max(
            max(model["vocab"].values(), default=-1),
            max((t["id"] for t in facts["added_tokens"]), default=-1),
        )
        + 1
    )
    if size > rows:
        raise ExportRefused(
            f"expected at most {rows} tokens, one per embedding row, found {size} in the tokenizer"
        )
    if model.get("byte_fallback"):
        vocabulary = _sentencepiece(facts, rows, bool(tokenizer.chat_template))
    else:
        vocabulary = _byte_level(facts, rows)
    _special(vocabulary, tokenizer)
    vocabulary.chat_template = chat_template_of(tokenizer, system_prompt)
    return vocabulary


def _byte_level(facts: dict[str, Any], rows: int) -> Vocabulary:
    model = facts["model"]
    patterns, prefix_space = _patterns(facts.get("pre_tokenizer"))
    if patterns not in PRE_TOKENIZERS:
        raise ExportRefused(
            "expected a pre-tokenizer llama.cpp knows ("
            + ", ".join(sorted(name for names in PRE_TOKENIZERS.values() for name in names.values()))
            + f"), found {json.dumps(facts.get('pre_tokenizer'), ensure_ascii=False)[:400]}; "
            "export the model as merged instead"
        )
    if prefix_space:
        raise ExportRefused(
            "expected a byte-level tokenizer without add_prefix_space, found one with it, which llama.cpp cannot do"
        )
    names, whole = PRE_TOKENIZERS[patterns], bool(model.get("ignore_merges"))
    pre = names.get(whole, next(iter(names.values())))
    tokens, types = _tokens(facts, rows)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    vocabulary = Vocabulary("gpt2", pre, tokens, types, merges=merges)
    if whole not in names:
        vocabulary.notes.append(
            f"llama.cpp's {pre} takes a word that is a token {'by merging its pieces' if whole else 'as it is'}, the "
            f"original {'as it is' if whole else 'by merging its pieces'}: rare words may be split otherwise"
        )
    if pre in ("tekken", "gpt-4o"):
        vocabulary.notes.append(
            f"llama.cpp's {pre} knows capitals of the Latin alphabet only: words of other scripts with capitals inside "
            "may be split otherwise"
        )
    if facts.get("normalizer"):
        vocabulary.notes.append(
            f"llama.cpp does not normalise text ({facts['normalizer'].get('type')}) before it is split into tokens"
        )
    return vocabulary


def _patterns(pre: dict[str, Any] | None) -> tuple[tuple[str, ...], bool]:
    """The patterns a byte-level pre-tokenizer splits by, in order, and whether it prepends a space."""
    steps = (pre.get("pretokenizers") or [pre]) if pre else []
    patterns: list[str] = []
    prefix_space = False
    for step in steps:
        kind = step.get("type")
        pattern = step.get("pattern") or {}
        if kind == "Split" and "Regex" in pattern and not step.get("invert"):
            patterns.append(pattern["Regex"])
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append(_DIGITS)
        elif kind == "ByteLevel":
            prefix_space = bool(step.get("add_prefix_space"))
            if step.get("use_regex", True):
                patterns.append(_GPT2)
        else:
            patterns.append(f"{kind}?")
    return tuple(patterns), prefix_space


def _sentencepiece(facts: dict[str, Any], rows: int, chat: bool) -> Vocabulary:
    """Scores by the rank of merges: llama.cpp merges the neighbours whose joined piece scores highest."""
    merges = [
        tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in facts["model"]["merges"]
    ]
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    tokens, types = _tokens(facts, rows)
    scores = [0.0] * rows
    for token_id, token in enumerate(tokens):
        if types[token_id] == gguf.TokenType.NORMAL:
            scores[token_id] = -float(rank.get(token, len(merges)))
        elif types[token_id] in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED):
            scores[token_id] = -1000.0 - len(merges)
    vocabulary = Vocabulary("llama", "default", tokens, types, scores=scores)
    vocabulary.add_space_prefix = _space_prefix(facts, chat)
    vocabulary.strips_after_special = any(
        token["special"] and token["rstrip"] for token in facts["added_tokens"]
    )
    pieces = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL]
    unlisted = _unlisted_merges(pieces, set(merges))
    if unlisted:
        vocabulary.notes.append(
            f"llama.cpp can form {unlisted} tokens from pairs the original does not merge; "
            "rare words may be split otherwise"
        )
    return vocabulary


def _unlisted_merges(pieces: list[str], merges: set[tuple[str, ...]]) -> int:
    """Number of pieces that split into two pieces without a merge; sentencepiece's own conversion has none."""
    known = set(pieces)
    return sum(
        any(
            piece[:cut] in known and piece[cut:] in known and (piece[:cut], piece[cut:]) not in merges
            for cut in range(1, len(piece))
        )
        for piece in pieces
    )


def _space_prefix(facts: dict[str, Any], chat: bool) -> bool:
    """True if text gets a leading space. llama.cpp adds it after special tokens too, as the older form does."""
    steps = _flat(facts.get("normalizer"), "normalizers") + _flat(facts.get("pre_tokenizer"), "pretokenizers")
    for step in steps:
        if step.get("type") == "Prepend":
            return True
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            # "first" means the start of the whole text, where a chat template has put a special token
            return bool(scheme == "always" or (scheme == "first" and not chat))
    return False


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, object]]:
    return list(step.get(inner) or [step]) if step else []


def _tokens(facts: dict[str, Any], rows: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Text and type of each row; rows beyond the tokenizer are unused."""
    sentencepiece = bool(facts["model"].get("byte_fallback"))
    tokens = [f"[PAD{row}]" for row in range(rows)]
    types = [gguf.TokenType.UNUSED] * rows
    for token, token_id in facts["model"]["vocab"].items():
        tokens[token_id] = token
        is_byte = sentencepiece and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        types[token_id] = gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL
    for added in facts["added_tokens"]:
        token_id, text = added["id"], added["content"]
        special = added["special"]
        # llama.cpp looks for these in the text as it is, before spaces become U+2581
        tokens[token_id] = text if special else text.replace("▁", " ")
        types[token_id] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    unknown = facts["model"].get("unk_token")
    if sentencepiece and unknown in facts["model"]["vocab"]:
        types[facts["model"]["vocab"][unknown]] = gguf.TokenType.UNKNOWN
    if len(set(tokens)) != len(tokens):
        twice = [token for token, count in Counter(tokens).most_common(5) if count > 1]
        raise ExportRefused(
            f"expected every token once, found {twice} more than once; llama.cpp refuses such a vocabulary"
        )
    return tokens, types


def _special(vocabulary: Vocabulary, tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        token = getattr(tokenizer, f"{name}_token_id", None)
        if token is not None:
            vocabulary.special[name] = int(token)
    turn_end = Encoder(tokenizer).turn_end_id
    if turn_end is not None and turn_end != vocabulary.special.get("eos"):
        vocabulary.special["eot"] = turn_end
    framed = tokenizer("a")["input_ids"]
    vocabulary.add_bos = bool(framed) and framed[0] == vocabulary.special.get("bos")
    vocabulary.add_eos = len(framed) > 1 and framed[-1] == vocabulary.special.get("eos")


def chat_template_of(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None = None
) -> str | list[dict[str, str]]:
    """The chat template as trained (`Encoder`), or several with their names. Raises ExportRefused.

    system_prompt: first turn for conversations without a system turn.
    """
    template = Encoder(tokenizer).tokenizer.chat_template
    if not isinstance(template, dict):
        return chat_template_with(tokenizer, template, system_prompt)
    named = {**template}
    if "default" in named:
        named["default"] = chat_template_with(tokenizer, named["default"], system_prompt)
    elif system_prompt:
        raise ExportRefused(
            f"expected a default chat template to carry the system prompt, found {', '.join(named)}; leave "
            "--system-prompt out"
        )
    return [{"name": name, "template": text} for name, text in named.items()]


def chat_template_with(tokenizer: PreTrainedTokenizerBase, template: str, system_prompt: str | None) -> str:
    """A chat template that starts with `system_prompt` if a conversation has no system turn."""
    if not system_prompt:
        return template
    turn = json.dumps({"role": "system", "content": system_prompt}, ensure_ascii=False)
    extension = (
        "{%- if not messages or messages[0]['role'] != 'system' -%}{%- set messages = ["
        + turn
        + "] + messages -%}{%- endif -%}"
        + template
    )
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Ratchet asks"}], chat_template=extension, tokenize=False
        )
    except TemplateError as error:
        raise ExportRefused(
            f"expected a chat template that takes a system turn, found one that refuses it ({error}); "
            "leave --system-prompt out"
        ) from error
    if system_prompt.strip() not in text:
        raise ExportRefused(
            "expected a chat template that shows a system turn, found one that leaves it out; leave --system-prompt out"
        )
    return extension
