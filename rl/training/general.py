"""General prompts beside a method's own rows: rehearsed while training, measured afterwards."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from packed_forward.logps import causal_model, collate, head_logits
from rl.gates.report import GeneralAnswers
from rl.training.encoding import EncodedResponse
from rl.training.held_out import loops
from rl.training.policy import LoadedPolicy, generate
from rl.training.scoring import POSITIONS, distributions_kl, kl_next_token, response_states

MEASURED = (
    "What is the capital of France?",
    "Name three fruits that are yellow.",
    "Write a polite reply to a neighbour who invites me to dinner. I cannot come.",
    "Why do leaves turn red in autumn?",
    "What is 7 plus 5?",
    "Summarise in one sentence: The museum opened in 1911. It was closed for ten years after a fire, and opened again "
    "last spring with a new wing for children.",
    "Explain to a child what a volcano is.",
    "How do I boil an egg?",
    "Give me two tips for a job interview.",
    "Who wrote Romeo and Juliet?",
    "Translate into Spanish: Good morning, my friend.",
    "What is the difference between a lake and a river?",
    "Write a short poem about the sea.",
    "I feel tired today. What can I do?",
    "Which is heavier, a kilogram of iron or two kilograms of feathers?",
    "List the days of the week.",
    "Rewrite this sentence in the past tense: She walks to school and meets her friends.",
    "What does a librarian do?",
    "Tell me a fact about elephants.",
    "Write the first two sentences of a story about a lost dog.",
    "Is it safe to eat raw potatoes?",
    "What should I pack for a weekend in the mountains?",
    "Thank you for your help!",
    "Describe the colour blue without using its name.",
)
"""Prompts of every evaluation."""

REHEARSED = (
    "What is the capital of Japan?",
    "Name four animals that can fly.",
    "Write a friendly message to a colleague who has a birthday today.",
    "Why is the sky dark at night?",
    "What is 9 minus 4?",
    "Summarise in one sentence: The bakery on our street closes at noon. It sells bread, rolls and two kinds of cake, "
    "and on Sundays people queue around the corner.",
    "Explain what a computer does to somebody who has never seen one.",
    "How do I make a cup of tea?",
    "Give me three tips for better sleep.",
    "Who painted the Mona Lisa?",
    "Translate into French: Where is the station?",
    "What is the difference between a cat and a tiger?",
    "Write a short poem about winter.",
    "I am nervous about my exam tomorrow. What would you advise?",
    "Which is faster, a bicycle or an aeroplane?",
    "List the four seasons.",
    "Correct the grammar of this sentence: He go to work by bus every days.",
    "What does a carpenter do?",
    "Tell me something interesting about the moon.",
    "Write the opening of a letter to my grandmother.",
    "Can I keep bananas in the fridge?",
    "What should I cook for four guests?",
    "Hello, how are you?",
    "Describe a forest after the rain.",
    "What are the main parts of a plant?",
    "How many minutes are in two hours?",
    "Suggest a name for a small cafe by the river.",
    "What happened in the year 1969?",
    "Write an email to ask for a day off.",
    "What is a synonym of happy?",
    "Explain how a bridge carries weight.",
    "What are the advantages of learning a second language?",
    "How can I save money every month?",
    "Write a sentence with the word umbrella.",
    "What is photosynthesis?",
    "Which countries border Germany?",
    "Give an example of a renewable source of energy.",
    "What is the opposite of difficult?",
    "Write a product description for a wooden chair.",
    "Why do we have leap years?",
    "How do I look after a house plant?",
    "Tell me a joke.",
    "What is the boiling point of water?",
    "Plan a simple workout for the morning.",
    "What is democracy?",
    "Write a headline for an article about clean rivers.",
    "Why do cats purr?",
    "Put these words in alphabetical order: pear, apple, orange, lemon.",
)
"""Prompts that training rehearses."""


ANSWER_TOKENS = 24
"""Tokens of a measured answer: whether it is plain text shows in its first words."""

MOST_BROKEN = 3
"""Broken answers kept as examples."""


def base_answers(
    policy: LoadedPolicy, prompts: Sequence[str], tokens: int, *, temperature: float = 0.0
) -> list[EncodedResponse]:
    """The base model's own answers, of so many tokens at most.

    An answer that was cut has no turn end. Temperature 0 is greedy; above, the same seed is used every time.
    """
    asked = [_asked(prompt) for prompt in prompts]
    with policy.without_adapter():
        answers = generate(policy, asked, max_new_tokens=tokens, temperature=temperature, batch_size=BATCH)
    items = policy.encoder.responses(
        [(messages, answer.text) for messages, answer in zip(asked, answers, strict=True)]
    )
    return [EncodedResponse(item.prompt_ids, item.response_ids[:tokens]) for item in items]


BATCH = 24
"""Prompts that are answered together."""


def general_answers(policy: LoadedPolicy, prompts: Sequence[str] = MEASURED) -> GeneralAnswers:
    """Figures of a policy's greedy answers to general prompts, beside those of its base."""
    items = base_answers(policy, prompts, ANSWER_TOKENS)
    decode = policy.tokenizer.decode
    base = [decode(item.response_ids, skip_special_tokens=True) for item in items]
    answers = generate(
        policy, [_asked(prompt) for prompt in prompts], max_new_tokens=ANSWER_TOKENS, batch_size=BATCH
    )
    own = [answer.text for answer in answers]
    sound, base_sound = plain_texts(own), plain_texts(base)
    apart = kl_next_token(policy, items, batch_size=BATCH)
    broken = [
        {"prompt": prompt, "answer": answer, "base": theirs}
        for prompt, answer, theirs, good, theirs_good in zip(
            prompts, own, base, sound, base_sound, strict=True
        )
        if theirs_good and not good
    ]
    return GeneralAnswers(
        kl=sum(apart) / sum(len(item.response_ids) for item in items),
        plain_text=sum(sound) / len(sound),
        base_plain_text=sum(base_sound) / len(base_sound),
        n=len(prompts),
        broken=tuple(broken[:MOST_BROKEN]),
    )


LETTERS = 0.6
"""Share of letters and digits among the signs of plain text, blanks aside: `7 + 5 = 12` has 0.67, prose above 0.9."""

REPEATED = 0.4
"""Share of different words below which a text of MANY_WORDS repeats itself."""

MANY_WORDS = 8

SAME = 3
"""Prompts with one and the same answer from which on it answers none of them."""


def plain_texts(answers: Sequence[str]) -> list[bool]:
    """Of each answer whether it is plain text, a rough rule without a dictionary.

    It is where it has letters or digits, at least LETTERS of its signs are such, it is neither JSON nor code by its
    first sign, does not repeat itself, and is not given to SAME prompts or more.
    """
    counts = Counter(answer.strip() for answer in answers)
    return [_is_plain_text(answer.strip()) and counts[answer.strip()] < SAME for answer in answers]


def _is_plain_text(text: str) -> bool:
    signs = [sign for sign in text if not sign.isspace()]
    if not signs or signs[0] in "{[<}`" or sum(map(str.isalnum, signs)) < LETTERS * len(signs):
        return False
    words = re.findall(r"\w+", text.lower())
    return not loops(text) and not (len(words) >= MANY_WORDS and len(set(words)) < REPEATED * len(words))


REHEARSED_TOKENS = 48
"""Tokens of a rehearsed answer."""


class Rehearsal:
    """KL(base || policy) per token of the base's own answers to general prompts, a term beside a method's loss.

    The answers are sampled at temperature 1, and the base's distribution at each of their tokens is the target
    (self-distillation), which it has no reason to leave: unlike a loss on the answers' tokens the term is 0, and has
    no gradient, as long as the policy is the base. Some rows are taken at each step, all of them once before
    any of them again.
    """

    def __init__(
        self, policy: LoadedPolicy, *, weight: float, rows: int, seed: int, prompts: Sequence[str] = REHEARSED
    ) -> None:
        """policy: the base before it is trained; weight: of the term; rows: answers a step."""
        self.weight, self.rows, self.seed = weight, min(rows, len(prompts)), seed
        self.pad_token_id = policy.pad_token_id
        self.items = base_answers(policy, prompts, REHEARSED_TOKENS, temperature=1.0)
        self.states: list[torch.Tensor] = []
        """Of each answer, the base's last hidden states [tokens, width] at the positions that predict it."""
        with torch.no_grad(), policy.without_adapter():
            for start in range(0, len(self.items), BATCH):
                part = self.items[start : start + BATCH]
                found = response_states(policy.model, self._batch(part, policy.device))
                self.states += [one.clone() for one in found.split([len(item.response_ids) for item in part])]

    def drawn(self, step: int) -> list[int]:
        """Numbers of the answers that a step rehearses; the same whenever it is asked."""
        steps = -(-len(self.items) // self.rows)
        order = random.Random(f"{self.seed} {step // steps}").sample(range(len(self.items)), len(self.items))
        return order[step % steps * self.rows :][: self.rows]

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        """The weighted term of a step, differentiable."""
        drawn = self.drawn(step)
        model = causal_model(model)
        own = response_states(model, self._batch([self.items[i] for i in drawn], model.device))
        target = torch.cat([self.states[i] for i in drawn])
        total = own.new_zeros((), dtype=torch.float32)
        for mine, theirs in zip(own.split(POSITIONS), target.split(POSITIONS), strict=True):
            # logits of a slice at a time, which are computed again on the way back
            total = total + checkpoint(_distance, model, mine, theirs, use_reentrant=False)
        return self.weight * total / len(own)

    def _batch(self, items: Sequence[EncodedResponse], device: torch.device) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in collate(items, self.pad_token_id).items()}


def _distance(model: torch.nn.Module, own: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum over positions of KL(target || own) of hidden states [n, width]; the head is never trained."""
    with torch.no_grad():
        log_p = torch.log_softmax(head_logits(model, target).float(), -1)
    log_q = torch.log_softmax(head_logits(model, own).float(), -1)
    return distributions_kl(log_p, log_q).sum()


def _asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]
