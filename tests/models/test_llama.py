import pytest
import torch
import torch._dynamo

from zpp_lab.config.model import ModelConfig
from zpp_lab.models import build_model
from zpp_lab.models.llama import Rope, complex_product, written_out

SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=4, ffn=48)
VOCAB = 61


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def test_loss_is_the_mean_cross_entropy_of_the_logits():
    model = build_model(SMALL, VOCAB)
    x, y = tokens(), tokens().roll(1, 1)
    logits = model(x)
    assert logits.shape == (2, 12, VOCAB)
    by_hand = -logits.double().log_softmax(-1).gather(-1, y[..., None]).mean()
    loss = model(x, y)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_no_position_sees_a_later_token():
    model = build_model(SMALL, VOCAB)
    x = tokens()
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotation_depends_on_distance_alone():
    rope = build_model(SMALL, VOCAB).layers[0].attention.rope
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 9, 1, 8)
    scores = torch.einsum("bthd,bshd->ts", rope.rotate(q), rope.rotate(k))
    for distance in range(9):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert not torch.allclose(scores[0, 0], scores[0, 4])
    assert torch.allclose(rope.rotate(q).norm(dim=-1), q.norm(dim=-1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 128])  # whole vectors of any CPU
def test_written_out_rotation_has_the_bits_of_the_complex_product(dtype, head_dim):
    rope = Rope(head_dim, 10000.0)
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(2, 50, 3, head_dim, generator=generator).to(dtype)
    slope = torch.randn(x.shape, generator=generator).to(dtype)
    found = []
    for product in (complex_product, written_out):
        leaf = x.clone().requires_grad_()
        pairs = leaf.float().unflatten(-1, (-1, 2))
        turned = product(pairs, rope.table(50, x.device)).flatten(-2).to(dtype)
        turned.backward(slope)
        found.append((turned.detach(), leaf.grad))
    assert torch.equal(found[0][0], rope.rotate(x)), "eager rotations are complex products"
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))
