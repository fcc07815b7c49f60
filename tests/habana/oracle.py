"""transformers' own models, in a process where optimum-habana has not replaced them."""

from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.habana.fresh import CONTEXT


class Oracle:
    """A model of transformers, used like one: `oracle(ids).logits` and `oracle.generate(ids, ...)`."""

    def __init__(self, config: dict[str, Any], directory: Path) -> None:
        """Makes a random model of a configuration and saves its files in the directory."""
        self._connection, other = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_answer, args=(other, config, directory), daemon=True)
        self._process.start()
        other.close()
        self._connection.recv()

    def __call__(self, ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.tensor(self._ask("logits", ids.tolist(), options)))

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `generate` of transformers."""
        return torch.tensor(self._ask("generate", ids.tolist(), options))

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()

    def _ask(self, *question: Any) -> Any:
        self._connection.send(question)
        return self._connection.recv()


@torch.inference_mode()
def _answer(connection: Connection, config: dict[str, Any], directory: Path) -> None:
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    assert not type(model).__name__.startswith("Gaudi")
    model.save_pretrained(directory)
    connection.send("ready")
    while True:
        try:
            name, ids, options = connection.recv()
        except EOFError:
            return
        if name == "generate":
            mask = torch.ones(1, len(ids[0]))
            connection.send(model.generate(torch.tensor(ids), **options | {"attention_mask": mask}).tolist())
        else:
            connection.send(model(torch.tensor(ids), **options).logits.numpy())
