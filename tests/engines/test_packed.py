"""Tests that packed linear layers compute what plain ones do, and which layers are packed."""

import pytest
import torch

from services.engines.cpu import has_bfloat16
from services.engines.torch.packed import PackedLinear, computes_bfloat16, pack

SHAPES = [(1, 1), (19, 37), (64, 256), (576, 1536), (1536, 576)]
# The largest difference from the plain product: relative, and for values near zero. Both round to the same dtype once.
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2**-7, 2**-7)}
BFLOAT16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(not computes_bfloat16(), reason="the processor does not compute in it")
)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@torch.inference_mode()
def test_a_packed_layer_computes_the_same_as_a_plain_one(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    packed = PackedLinear(plain)
    for shape in [(1,), (2,), (5,), (16,), (300,), (1, 7), (2, 3), (0,)]:
        rows = torch.randn(*shape, inputs, dtype=dtype)
        relative, absolute = TOLERANCES[dtype]
        torch.testing.assert_close(packed(rows), plain(rows), rtol=relative, atol=absolute)


@torch.inference_mode()
def test_rows_that_are_not_contiguous_are_multiplied_as_they_are() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(19, 37)
    rows = torch.randn(4, 38)[:, ::2]
    torch.testing.assert_close(PackedLinear(plain)(rows), plain(rows), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_the_weights_can_still_be_read() -> None:
    plain = torch.nn.Linear(19, 37)
    assert torch.equal(PackedLinear(plain).weight, plain.weight)


class _Doubling(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@torch.inference_mode()
def test_layers_of_other_types_stay() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4),
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, dtype=torch.float16)),
        _Doubling(4, 4),
    )
    pack(model)
    inner = model[1]
    assert isinstance(inner, torch.nn.Sequential)
    assert [type(layer) for layer in (model[0], *inner, model[2])] == [
        PackedLinear,
        PackedLinear,
        torch.nn.Linear,
        _Doubling,
    ]


@torch.inference_mode()
def test_tied_weights_stay_those_of_the_embeddings() -> None:
    model = torch.nn.ModuleDict({"embeddings": torch.nn.Embedding(7, 4), "head": torch.nn.Linear(4, 7, bias=False)})
    embeddings, head = model["embeddings"], model["head"]
    assert isinstance(head, torch.nn.Linear) and isinstance(embeddings, torch.nn.Embedding)
    head.weight = embeddings.weight
    pack(model)
    rows = torch.randn(3, 4)
    torch.testing.assert_close(model["head"](rows), rows @ embeddings(torch.arange(7)).T)


def test_a_processor_that_linux_reports_to_compute_in_bfloat16_does_so_in_torch() -> None:
    assert not has_bfloat16() or computes_bfloat16()
