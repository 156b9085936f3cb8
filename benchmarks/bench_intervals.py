"""How often `bench compare` and `bench replay --ab` call two alike servers different, by how they draw requests anew.

A server with one queue, exponential service and Poisson arrivals; requests wait for those before them, so neighbours are
alike. Both runs are of the same server: what is not "the interval holds zero" is a false alarm, wanted in 5% of trials.

    python benchmarks/bench_intervals.py
"""

import random

from dynctl.bench.resampling import Quantile, interval, stretch_length

TRIALS = 200


def latencies(rng, num, load, works=None):
    """Time from arrival to the end of service of each request in turn."""
    wait, found = 0.0, []
    for at in range(num):
        work = works[at] if works else rng.expovariate(1.0)
        found.append(wait + work)
        wait = max(0.0, wait + work - rng.expovariate(load))
    return found


def cut(values, length):
    return [values[at : at + length] for at in range(0, len(values), length)]


def false_alarms(num, load, q, length, *, are_paired):
    alarms = 0
    for trial in range(TRIALS):
        rng = random.Random(f"{num}/{load}/{trial}")
        works = [rng.expovariate(1.0) for _ in range(num)] if are_paired else None
        one, other = (latencies(rng, num, load, works) for _ in range(2))
        bounds = interval(
            Quantile(cut(one, length), q),
            Quantile(cut(other, length), q),
            lambda a, b: b / a - 1,
            random.Random(trial),
            are_paired=are_paired,
        )
        alarms += bounds is not None and not bounds[0] <= 0 <= bounds[1]
    return alarms / TRIALS


def main():
    print("requests  load  figure  paired   single requests  stretches")
    for num in (200, 1000):
        for load in (0.3, 0.6):
            for q in (0.5, 0.9):
                for are_paired in (False, True):
                    rates = [
                        false_alarms(num, load, q, length, are_paired=are_paired)
                        for length in (1, stretch_length(num))
                    ]
                    print(
                        f"{num:8}  {load:4}  p{q * 100:.0f}     {are_paired!s:5}   "
                        f"{rates[0]:15.1%}  {rates[1]:9.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
