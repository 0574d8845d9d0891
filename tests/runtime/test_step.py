"""All buckets are compiled when a Stepper is made: no call after that compiles, 4-bit weights on a CPU included.

Those are called through the jitted step (see runtime/step.py), which must find the executable that was made.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from moec.compiler.emit.emit import emit
from moec.compiler.plan.choose import make_plan
from moec.compiler.spec.load import load
from moec.compiler.verify.random_checkpoint import write_random_checkpoint
from moec.runtime.cache import allocate_state
from moec.runtime.packing import Row
from moec.runtime.program import load_program
from moec.runtime.sampling import GREEDY
from moec.runtime.step import Stepper
from moec.runtime.weights import load_weights

SPECS = Path(__file__).parents[1] / "numerics" / "specs"


@contextmanager
def compiled_modules() -> Iterator[list[str]]:
    """What jax compiles inside, an entry per executable."""
    found: list[str] = []

    def listen(event: str, duration: float, **facts: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(facts.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_no_call_compiles(tmp_path: Path) -> None:
    request = load(
        str(SPECS / "packed_int4.yaml"), target="cpu", workload="tiny", overrides=["plan.dtypes.expert=int4"]
    )
    emit(request.graph, make_plan(request), tmp_path / "program")
    write_random_checkpoint(request.graph, tmp_path / "weights")
    program = load_program(tmp_path / "program")
    mesh = program.mesh(jax.devices()[:1])
    weights = load_weights(program, mesh, tmp_path / "weights")
    assert weights["stacks"]["moe"]["w_up"].dtype.name == "int4"
    state = allocate_state(program, mesh, program.NUM_PAGES, program.NUM_SLOTS)
    with compiled_modules() as found:
        stepper = Stepper(program, mesh, program.STEPS, program.BUCKETS, weights, state)
    assert len(found) == len(program.BUCKETS)  # the listener hears what is compiled
    row = Row((1, 2, 3), 0, (1,), 1, False, GREEDY)
    following = Row((4,), 3, (1,), 1, True, GREEDY)
    with compiled_modules() as found:
        for rows in ([row], [following]):
            state, _ = stepper(weights, state, [rows])
    assert found == []
