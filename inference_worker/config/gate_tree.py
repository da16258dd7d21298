"""A gate of the documents and those inside it, as they stand there: for who looks at documents and makes no gates.

Not here: what is wrong with them (`gates/making.py`). What cannot be read is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from inference_worker.config.documents import GateConfig
from inference_worker.gates.parameters import Parameters

DEEPEST: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTree:
    """One gate, and what is inside it."""

    gate_type: str
    given: Parameters
    inner: tuple["GateTree", ...] = ()

    def __str__(self) -> str:
        return self.gate_type + (f"({', '.join(map(str, self.inner))})" if self.inner else "")

    def all(self) -> Iterator["GateTree"]:
        """This one, and all inside it."""
        yield self
        for gate in self.inner:
            yield from gate.all()


def gate_tree(config: GateConfig) -> GateTree:
    """The whole of a gate."""
    return _tree(config.gate_type, Parameters(config.gate_params, config.where, []), 1)


def _tree(gate_type: str, given: Parameters, depth: int) -> GateTree:
    inner: list[GateTree] = []
    if depth < DEEPEST:
        match gate_type:
            case "composite":
                inner = [_tree(spec.gate_type, spec.given, depth + 1) for spec in given.gates("gates")]
            case "wait-on-refuse" if (spec := given.gate("gate")) is not None:
                inner = [_tree(spec.gate_type, spec.given, depth + 1)]
            case "tier-priority-admission" if saturation := given.text("saturation_gate", ""):
                inner = [_tree(saturation, given.inner("saturation_gate_params"), depth + 1)]
    return GateTree(gate_type=gate_type or "constant", given=given, inner=tuple(inner))
