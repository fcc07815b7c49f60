"""Lays out weights for oneDNN once, instead of multiplying them as they lie.

A product with several rows reads the same weights as one with a single row, and blocks of candidates are two to sixteen
rows. In float32 without AVX-512 the plain product with them takes three to four times as long as with one row, and 1.4
times with packed weights. In bfloat16 with AVX-512 packed weights take two thirds of the time at every width.
"""

import torch

# The number of rows that the layout is chosen for. It made no difference between 8 and 16.
_ROWS = 8


class PackedLinear(torch.nn.Module):
    """Replaces a `torch.nn.Linear` on a CPU, and keeps no other copy of its weights.

    `row_limit`: more rows than this are divided into several products, because a larger one may round differently.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.row_limit: int | None = None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    @property
    def weight(self) -> torch.Tensor:
        """Weights [out_features, in_features] as they were: slow, for models that read them directly."""
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features] for rows [..., in_features]."""
        if not self.row_limit or rows.shape[-2] <= self.row_limit:
            return self.product(rows)
        return torch.cat([self.product(some) for some in torch.split(rows, self.row_limit, -2)], -2)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns [..., out_features] for rows [..., in_features], from a single product."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return product


def pack(model: torch.nn.Module) -> bool:
    """Packs the model's linear layers that can be packed. Returns whether there are any.

    One after another, so that memory holds only one of them twice.
    """
    packed = False
    if not torch._C._has_mkldnn:
        return packed
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A subclass may compute something else.
            if type(child) is torch.nn.Linear and _is_packable(child.weight):
                setattr(parent, name, PackedLinear(child))
                packed = True
    return packed


def computes_bfloat16() -> bool:
    """Returns whether the processor computes in bfloat16. Without its instructions, that is slower than float32."""
    capability = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if capability:
        return bool(capability.get("avx512_bf16") or capability.get("amx_bf16") or capability.get("bf16"))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_packable(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu":
        return False
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and computes_bfloat16())
