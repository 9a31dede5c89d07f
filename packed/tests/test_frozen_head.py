"""The two-product head against TRL's general function, which also differentiates a head that is trained."""

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from packed_forward import logps
from packed_forward.logps import FrozenHeadLogProb

EXTRAS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
TOKENS, WIDTH, VOCABULARY = 7, 16, 61


def parts(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight, bias = torch.randn(VOCABULARY, WIDTH).to(dtype), torch.randn(VOCABULARY).to(dtype)
    return hidden, weight, bias, torch.randint(0, VOCABULARY, (TOKENS,))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.7, 0.25)])
@pytest.mark.parametrize("entropy", [False, True])
def test_outputs_and_gradients_are_those_of_the_general_function(
    softcap: float | None, temperature: float, scale: float, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logps, "CELLS", 3 * VOCABULARY)  # three tokens at once, the last slice shorter
    hidden, weight, bias, targets = parts()
    weights = torch.linspace(-1, 1, TOKENS)
    expected = ChunkedLogProbFunction.apply(
        hidden, weight, bias, targets, temperature, 20, softcap, scale, EXTRAS
    )
    found = FrozenHeadLogProb.apply(hidden, weight, bias, targets, temperature, softcap, scale, EXTRAS)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients = []
    for outputs in (expected, found):
        loss = (outputs[0] * weights).sum() + (0.3 * outputs[1].sum() if entropy else 0)
        gradients.append(torch.autograd.grad(loss, hidden)[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_a_token_the_model_is_sure_of_keeps_its_small_gradient_in_bfloat16() -> None:
    hidden, weight, _, _ = parts(torch.bfloat16)
    hidden = (hidden * 4).detach().requires_grad_()
    # the same logits, rounded to bfloat16, for all three
    logits = (hidden @ weight.t()).detach().double()
    targets = logits.argmax(-1)
    p = torch.softmax(logits, -1)
    assert float(p.max()) > 0.9999  # rounded to bfloat16 this is 1, and 1 - p nothing
    expected = (torch.nn.functional.one_hot(targets, VOCABULARY) - p) @ weight.double()
    (found,) = torch.autograd.grad(
        FrozenHeadLogProb.apply(hidden, weight, None, targets, 1.0, None, 1.0, ())[0].sum(), hidden
    )
    assert float(((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 0.02


def test_nothing_kept_without_gradients_and_no_token() -> None:
    # without gradients nothing is kept for them
    hidden, weight, bias, targets = parts()
    found = FrozenHeadLogProb.apply(hidden.detach(), weight, bias, targets, 1.0, None, 1.0, ())
    assert not found[0].requires_grad
    assert found[1:] == (None, None, None, None)
    # no token is no error
    hidden, weight, bias, targets = parts()
    found = FrozenHeadLogProb.apply(hidden[:0], weight, bias, targets[:0], 1.0, None, 1.0, EXTRAS)
    assert [len(values) for values in found] == [0] * 5
