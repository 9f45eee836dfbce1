"""What a GPU worker allocates for a model of which there is a header."""

from __future__ import annotations

from sparkd.executors.cuda import CudaExecutor
from sparkd.executors.cuda_counted import CountingDevice
from sparkd.graph.state import StateLayout
from sparkd.planning.shape import HeaderWeights, Shape


def allocated(shape: Shape, context: int, chunk: int) -> int:
    """Bytes that a GPU worker allocates for one sequence of `context` positions, beside slots for experts."""
    device = CountingDevice()
    layout = StateLayout.of(shape.program, 2)
    pages = [group.pages_for(context, chunk) for group in layout.groups]
    weights = HeaderWeights(shape.model, shape.whole)
    CudaExecutor(device, shape.program, weights, layout, pages=pages, slots=1, context=context, prompt_rows=chunk)
    return device.bytes
