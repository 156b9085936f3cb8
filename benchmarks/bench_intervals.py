"""How often `bench compare` and `bench replay --ab` call two alike servers different, by how they draw requests anew.

A server with one queue, exponential service and Poisson arrivals; requests wait for those before them, so neighbours are
alike. Both runs are of the same server: where the interval leaves zero out is a false alarm, wanted in 5% of trials.

    python benchmarks/bench_intervals.py
"""

import random

from dynctl.bench.repeats import changed_between
from dynctl.bench.resampling import Quantile, Ratio, interval, stretch_length, value_of

TRIALS = 200
NUM = 200


def latencies(rng, load, works=None):
    """Time from arrival to the end of service of each request in turn."""
    wait, found = 0.0, []
    for at in range(NUM):
        work = works[at] if works else rng.expovariate(1.0)
        found.append(wait + work)
        wait = max(0.0, wait + work - rng.expovariate(load))
    return found


def statistic(values, length, figure):
    stretches = [values[at : at + length] for at in range(0, NUM, length)]
    if figure == "p90":
        return Quantile(stretches, 0.9)
    return Ratio([(sum(each), len(each)) for each in stretches], NUM)


def false_alarms(load, figure, length, *, are_paired):
    alarms = 0
    for trial in range(TRIALS):
        rng = random.Random(f"{load}/{trial}")
        works = [rng.expovariate(1.0) for _ in range(NUM)] if are_paired else None
        one, other = (latencies(rng, load, works) for _ in range(2))
        low, high = interval(
            statistic(one, length, figure),
            statistic(other, length, figure),
            lambda a, b: b / a - 1,
            random.Random(trial),
            are_paired=are_paired,
        )
        alarms += not low <= 0 <= high
    return alarms / TRIALS


def repeated_alarms(load, figure, num_runs):
    """The same of runs that were repeated, so many on each side, by how far runs differ."""
    alarms = 0
    for trial in range(TRIALS * 5):
        rng = random.Random(f"{load}/{num_runs}/{trial}")
        sides = [
            [value_of(statistic(latencies(rng, load), NUM, figure)) for _ in range(num)]
            for num in num_runs
        ]
        low, high = changed_between(f"e2e_{figure}", *sides, 0.0).interval
        alarms += not low <= 0 <= high
    return alarms / (TRIALS * 5)


def main():
    print("load  figure  pairs  single requests  stretches", flush=True)
    for load in (0.3, 0.6):
        for figure in ("mean", "p90"):
            for are_paired in (False, True):
                rates = [
                    false_alarms(load, figure, length, are_paired=are_paired)
                    for length in (1, stretch_length(NUM))
                ]
                pairs = "yes" if are_paired else "no"
                print(
                    f"{load:4}  {figure:6}  {pairs:5}  {rates[0]:15.1%}  {rates[1]:9.1%}",
                    flush=True,
                )
    print("\nload  figure  runs on each side: 2 and 2, 3 and 3, 5 and 5, 1 and 5", flush=True)
    for load in (0.3, 0.6):
        for figure in ("mean", "p90"):
            rates = [
                repeated_alarms(load, figure, num_runs)
                for num_runs in ((2, 2), (3, 3), (5, 5), (1, 5))
            ]
            print(f"{load:4}  {figure:6}  {'  '.join(f'{rate:.1%}' for rate in rates)}", flush=True)


if __name__ == "__main__":
    main()
