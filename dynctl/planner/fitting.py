"""Least squares in plain Python: Levenberg-Marquardt on logarithms of constants, with shrinkage towards a prior.

Few unknowns, hundreds of points: seconds of work, and no numerical library to install.
Pure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Vector = list[float]
_SOFT = 0.15
"""Residuals beyond this count less and less: a few odd measurements must not bend a fit."""

_NUDGE = 1e-3


@dataclass(frozen=True, slots=True)
class Unknown:
    """One number to fit, as the logarithm of a factor; `rows` are the residuals it can change."""

    prior: float
    weight: float
    """Pull towards the prior, in units of one residual."""
    rows: Sequence[int]
    low: float = -4.0
    high: float = 4.0


def fit(
    residuals: Callable[[Vector, Sequence[int]], list[tuple[float, ...]]],
    unknowns: Sequence[Unknown],
    num_rows: int,
    rounds: int = 12,
) -> Vector:
    """Find the logarithms that make the residuals of all rows smallest.

    `residuals(x, rows)` returns the residuals of these rows.
    """
    x = [u.prior for u in unknowns]
    everything = range(num_rows)
    now = residuals(x, everything)
    cost = _cost(now, x, unknowns)
    damping = 1e-2
    for _ in range(rounds):
        matrix, vector = _normal(residuals, unknowns, x, now)
        before = cost
        for _ in range(6):
            step = solve(_damped(matrix, damping), vector)
            tried = [
                min(u.high, max(u.low, a + max(-1.0, min(1.0, b))))
                for a, b, u in zip(x, step, unknowns, strict=True)
            ]
            found = residuals(tried, everything)
            price = _cost(found, tried, unknowns)
            if price < cost:
                x, now, cost, damping = tried, found, price, max(damping / 4, 1e-6)
                break
            damping *= 6
        if before - cost < 1e-4 * before:
            break
    return x


def _rho(r: float) -> float:
    return 2 * _SOFT**2 * (math.sqrt(1 + (r / _SOFT) ** 2) - 1)


def _cost(rows: Sequence[tuple[float, ...]], x: Vector, unknowns: Sequence[Unknown]) -> float:
    loss = sum(_rho(r) for row in rows for r in row)
    return loss + sum((u.weight * (a - u.prior)) ** 2 for a, u in zip(x, unknowns, strict=True))


def _normal(
    residuals: Callable[[Vector, Sequence[int]], list[tuple[float, ...]]],
    unknowns: Sequence[Unknown],
    x: Vector,
    now: Sequence[tuple[float, ...]],
) -> tuple[list[Vector], Vector]:
    """Normal equations of the linearised problem; rows far off weigh less.

    Summed row by row: a row knows only the few unknowns that can change it.
    """
    size = len(unknowns)
    touched: list[tuple[list[int], list[tuple[float, ...]]]] = [([], []) for _ in now]
    for i, unknown in enumerate(unknowns):
        moved = list(x)
        moved[i] += _NUDGE
        for row, new in zip(unknown.rows, residuals(moved, unknown.rows), strict=True):
            indices, slopes = touched[row]
            indices.append(i)
            slopes.append(tuple((b - a) / _NUDGE for a, b in zip(now[row], new, strict=True)))
    matrix = [[0.0] * size for _ in range(size)]
    vector = [0.0] * size
    for errors, (indices, slopes) in zip(now, touched, strict=True):
        for k, r in enumerate(errors):
            weight = 1 / math.sqrt(1 + (r / _SOFT) ** 2)
            own = [slope[k] for slope in slopes]
            for n, i in enumerate(indices):
                share = weight * own[n]
                vector[i] -= share * r
                line = matrix[i]
                for j, slope in zip(indices[n:], own[n:], strict=True):
                    line[j] += share * slope
    for i, unknown in enumerate(unknowns):
        for j in range(i):
            matrix[i][j] = matrix[j][i]
        pull = unknown.weight**2
        matrix[i][i] += pull
        vector[i] -= pull * (x[i] - unknown.prior)
    return matrix, vector


def _damped(matrix: list[Vector], damping: float) -> list[Vector]:
    return [
        [value + (damping * (value + 1e-3) if i == j else 0.0) for j, value in enumerate(row)]
        for i, row in enumerate(matrix)
    ]


def solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> Vector:
    """Solve a symmetric system without negative directions; a direction that nothing determines stays at 0.

    Eliminates in the given order without pivots, and over what is not zero only: unknowns that touch few others
    should stand first.
    """
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    reach: list[list[int]] = []
    """Columns right of the diagonal that are not zero, by row."""
    for column, top in enumerate(rows):
        live = [j for j in range(column + 1, size) if top[j]]
        reach.append(live)
        pivot = top[column]
        if pivot < 1e-12:
            continue
        ends = (*live, size)
        for i in live:
            row = rows[i]
            share = row[column] / pivot
            for j in ends:
                row[j] -= share * top[j]
    found = [0.0] * size
    for i in range(size - 1, -1, -1):
        top = rows[i]
        if top[i] >= 1e-12:
            found[i] = (top[size] - sum(top[j] * found[j] for j in reach[i])) / top[i]
    return found
