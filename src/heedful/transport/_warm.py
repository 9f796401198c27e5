"""An assignment that starts at the potentials of an earlier one, of clouds that lay near."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful.transport._clouds import Array

# Pairs that are looked at first, and most that are added at once, for each point.
PAIRS = 12
# Rows of which the cost that this share of pairs lies below is read off.
SAMPLE = 16
# Pairs within this share of the worst violation are added with the violated ones.
NEAR = 0.25
# Potentials may miss the constraints by this share of the mean cost, which bounds the relative error of the plan's cost.
SLACK = 1e-12

Index = NDArray[np.intp]


def improved(ot: Any, reduced: Array, index: Index, unit: float) -> tuple[Index, Array, Array]:
    r"""The optimal assignment for reduced costs $R_{ij} = C_{ij} - u_i - v_j$, and how much the potentials rise, (index, du, dv).

    `index` is a near-optimal assignment whose pairs have R = 0, `unit` a typical cost. Where R has no negative entry, `index` is optimal.
    Otherwise the potentials are lowered until none has, and the few pairs of least R are solved for alone, as a sparse problem of POT's network
    simplex. If its potentials satisfy all constraints $du_i + dv_j \le R_{ij}$, its assignment is optimal among all pairs (linear programming
    duality); those that do not are added, with those that nearly do not, until none is left. `reduced` is overwritten.
    """
    count = len(reduced)
    flat, rows, bound = reduced.ravel(), np.arange(count), -SLACK * unit
    if reduced.min() >= bound:
        return index, np.zeros(count), np.zeros(count)
    v = reduced.min(0)
    reduced -= v
    u = reduced.min(1)
    reduced -= u[:, None]
    sample = reduced[:: max(1, count // SAMPLE)].ravel()
    place = min(PAIRS * len(sample) // count, len(sample) - 1)
    chosen = reduced <= np.partition(sample, place)[place]
    chosen[rows, index] = True
    chosen = chosen.ravel()
    while True:
        pairs = np.flatnonzero(chosen)
        index, du, dv = _sparse(ot, pairs, flat[pairs], count, unit)
        u, v = u + du, v + dv
        reduced -= du[:, None]
        reduced -= dv
        least = reduced.min()
        if least >= bound:
            return index, u, v
        # The next potentials differ from these: pairs that are nearly wrong now would be so then.
        near = np.flatnonzero(reduced < -least * NEAR)
        near = near[~chosen[near]]
        values = flat[near]
        # A pair that was solved for and misses by more than the slack is rounding.
        if not (values < bound).any():
            return index, u, v
        if len(near) > PAIRS * count:
            near = near[values <= np.partition(values, PAIRS * count)[PAIRS * count]]
            near = np.concatenate((near, rows * count + reduced.argmin(1), reduced.argmin(0) * count + rows))
        chosen[near] = True


def _sparse(ot: Any, pairs: Index, costs: Array, count: int, unit: float) -> tuple[Index, Array, Array]:
    """The cheapest assignment among some pairs, places in a flat matrix, and its potentials."""
    from scipy.sparse import coo_array

    # Sparse matrices have no entries of zero, and POT lets go of differences below an absolute bound.
    low = costs.min() - unit
    mass = np.full(count, 1 / count)
    matrix = coo_array(((costs - low) / unit, np.divmod(pairs, count)), shape=(count, count))
    plan, log = ot.emd(mass, mass, matrix, numItermax=100 * count * count, log=True, check_marginals=False)
    taken = plan.data > 0.5 / count
    index = np.empty(count, dtype=np.intp)
    index[plan.row[taken]] = plan.col[taken]
    return index, unit * log["u"] + low, unit * log["v"]
