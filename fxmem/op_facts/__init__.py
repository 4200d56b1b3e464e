"""The one table of what fxmem knows about ops beyond what it observes.

fxmem runs a step on fake tensors and observes what each op allocates, saves, writes and draws. What no such run can show
is a row here: which ops it concerns (``aten.relu.default``; ``aten.lstm`` for all overloads; ``c10d.*`` for a namespace;
``torch.Tensor.item`` for a function of torch; ``fxmem.relu_`` for a function of fxmem that stands in graphs as an op), the
fact, why it cannot be observed, and the test that shows it. Rows hold names only, so planners, which do without torch, may
read them; :mod:`fxmem.op_facts.lookup` has the same by the op itself. The functions that implement a fact (a fixup, an
in-place form) stay in their rooms and are named by the row.
"""

from fxmem.op_facts import costs, effects, fakes, roles, saving
from fxmem.op_facts.kinds import OpFact

FACTS: tuple[OpFact, ...] = (*effects.FACTS, *saving.FACTS, *fakes.FACTS, *costs.FACTS, *roles.FACTS)


def names_of(kind: type) -> frozenset[str]:
    """Return the names of the ops that have a fact of this kind."""
    return frozenset(name for fact in FACTS if isinstance(fact.value, kind) for name in fact.ops)
