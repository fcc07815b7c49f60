"""Runs passes on one device. Each process of a sharded model has a worker, and all run the same messages."""

from typing import Any

import torch

from services.engines.habana.cache import Attended, Past, SlotCache, attending
from services.engines.habana.shapes import Kind, Message, Shape, Shapes, inputs_of, shape_of, slots_of
from services.engines.spec import GaudiOptions


class Pass(torch.nn.Module):
    """One pass as a function of tensors, so that it can be recorded as a graph for each shape."""

    def __init__(self, model: Any, slot_count: int, capacity: int, options: dict[str, bool]) -> None:
        super().__init__()
        self.model = model
        self._slot_count, self._options = slot_count, options
        self._past = [Past.of(capacity)] * model.config.get_text_config().num_hidden_layers

    def forward(
        self, inputs: torch.Tensor, wanted: torch.Tensor, slot: torch.Tensor, length: int, alone: bool
    ) -> torch.Tensor:
        """Returns logits [wanted, vocabulary size]. `inputs`: see `services.engines.habana.shapes.inputs_of`."""
        shape = Shape(inputs.shape[1], length, alone)
        ids, slots, positions, cells = inputs.unbind(0)
        with attending(Attended(shape, self._slot_count, slots, positions, slot)):
            found: torch.Tensor = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                past_key_values=self._past,
                use_cache=True,
                reuse_cache=True,
                # optimum-habana counts from one.
                token_idx=cells + 1,
                logits_to_keep=wanted,
                **self._options,
            ).logits[0]
        return found


class Copy(torch.nn.Module):
    """Copies the beginning of a slot to another one, in all layers."""

    def __init__(self, caches: list[SlotCache], slot_count: int) -> None:
        super().__init__()
        self._slot_count = slot_count
        self._caches = caches  # the model's modules, not this one's

    def forward(self, slots: torch.Tensor, length: int) -> None:
        """`slots` [2]: source and target."""
        first = torch.arange(length, device=slots.device) * self._slot_count
        for cache in self._caches:
            cache.copy(first + slots[0], first + slots[1])


class Worker:
    """Executes messages. Nothing that it does before the result is read waits for the device."""

    def __init__(
        self, model: Any, caches: list[SlotCache], shapes: Shapes, gaudi: GaudiOptions, options: dict[str, bool]
    ) -> None:
        import habana_frameworks.torch.core as htcore

        self._mark_step, self._shapes, self._gaudi = htcore.mark_step, shapes, gaudi
        self._device = next(model.parameters()).device
        for cache in caches:
            cache.allocate(shapes.cell_count)
        self._pass = Pass(model, shapes.slot_count, shapes.capacity, options)
        self._copy = Copy(caches, shapes.slot_count)
        if gaudi.use_hpu_graphs:
            from habana_frameworks.torch.hpu import wrap_in_hpu_graph

            self._pass = wrap_in_hpu_graph(self._pass, max_graphs=gaudi.max_graphs)
            self._copy = wrap_in_hpu_graph(self._copy)

    @torch.inference_mode()
    def execute(self, message: Message) -> torch.Tensor | None:
        """Runs a pass and returns its logits [logit_count, vocabulary size] on the device, or copies a slot."""
        slots = slots_of(message)
        if message[0] == Kind.COPY:
            self._copy(self._sent(slots), int(message[2]))
            self._mark_step()
            return None
        shape = shape_of(message)
        # A tensor for each part: in lazy mode, a view that is taken later would become part of the graph of the pass.
        inputs, wanted, slot = (self._sent(part) for part in (*inputs_of(message, shape), slots[:1]))
        # In lazy mode, what was sent must not become part of the graph of the pass.
        self._mark_step()
        bypass = self._gaudi.limit_hpu_graphs and self._shapes.is_prompt(shape)
        options = {"bypass_hpu_graphs": bypass} if self._gaudi.use_hpu_graphs else {}
        logits: torch.Tensor = self._pass(inputs, wanted, slot, shape.length, shape.alone, **options)
        self._mark_step()
        return logits

    def _sent(self, numbers: Message) -> torch.Tensor:
        # A copy, because the caller may reuse its memory before the device has read it.
        return torch.from_numpy(numbers.copy()).to(self._device, non_blocking=True)
