"""Policy losses as loops over the tokens of one sample, in Python numbers, each with its derivative by hand.

A loop takes a `Told` and returns `(values, slopes)`: the loss of each token, and `slopes[t][s]`, the
derivative of token t's loss by the log-probability of token s.
"""

import math

import attrs


@attrs.frozen(kw_only=True)
class Told:
    """What is known of one sample: lists with an entry a trained token, and its advantage."""

    logprobs: list
    old: list
    sampled: list
    reference: list
    entropies: list
    advantage: float


def each(function):
    """Make a loop of a function of one token: `(sample, t) -> (value, slope)`."""

    def loop(told):
        found = [function(told, t) for t in range(len(told.logprobs))]
        slopes = [[slope if s == t else 0.0 for s in range(len(found))] for t, (_, slope) in enumerate(found)]
        return [value for value, _ in found], slopes

    return loop


def surrogate(ratio, advantage, low, high, delta=math.inf):
    """Return the clipped loss and its derivative by the log of the ratio."""
    capped, held = min(ratio, delta), min(max(ratio, 1 - low), 1 + high)
    if capped * advantage <= held * advantage:
        return -capped * advantage, -ratio * advantage if ratio <= delta else 0.0
    return -held * advantage, -ratio * advantage if 1 - low <= ratio <= 1 + high else 0.0


def clipped(**numbers):
    def one(told, t):
        return surrogate(math.exp(told.logprobs[t] - told.old[t]), told.advantage, **numbers)

    return each(one)


def cispo(cap):
    def one(told, t):
        weight = min(math.exp(told.logprobs[t] - told.old[t]), cap) * told.advantage
        return -weight * told.logprobs[t], -weight

    return each(one)


def sapo(positive, negative):
    def one(told, t):
        tau = positive if told.advantage > 0 else negative
        ratio = math.exp(told.logprobs[t] - told.old[t])
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * told.advantage, -4 * gate * (1 - gate) * ratio * told.advantage

    return each(one)


def sequence(power, **numbers):
    """Return the loop of a sequence's ratio exp(power(length) * sum of log-ratios)."""

    def loop(told):
        size = len(told.logprobs)
        logs = math.fsum(p - q for p, q in zip(told.logprobs, told.old, strict=True))
        value, slope = surrogate(math.exp(power(size) * logs), told.advantage, **numbers)
        return [value] * size, [[slope * power(size)] * size] * size

    return loop


def gmpo(low, high):
    def loop(told):
        size, held, inside = len(told.logprobs), [], []
        for p, q in zip(told.logprobs, told.old, strict=True):
            d = p - q
            within = min(max(d, -low), high)
            held.append(min(d, within) if told.advantage > 0 else max(d, within))
            inside.append(held[-1] == d)
        mean = math.exp(math.fsum(held) / size)
        slopes = [-told.advantage * mean / size if i else 0.0 for i in inside]
        return [-told.advantage * mean] * size, [slopes] * size

    return loop


def vespo(weight=None):
    def loop(told):
        size, logs = len(told.logprobs), 0.0
        for t in range(size):
            logs += min(max(told.logprobs[t] - told.old[t], -20.0), 20.0)
            if weight is not None:
                w = weight(told, t)
                logs += min(max(math.log(w) if w else -math.inf, math.log(1e-8)), 20.0)
        logs = min(max(logs, math.log(1e-8)), 20.0)
        k, lam = (2.0, 3.0) if told.advantage >= 0 else (3.0, 2.0)
        phi = math.exp(lam + k * logs - lam * math.exp(logs)) * told.advantage
        return [-phi * p for p in told.logprobs], [
            [-phi if s == t else 0.0 for s in range(size)] for t in range(size)
        ]

    return loop


def drift(told, t):
    return math.exp(told.old[t] - told.sampled[t])


def truncated(told, t, floor=0.0, cap=3.0):
    return min(max(drift(told, t), floor), cap)


def masked(told, t, floor=0.0, cap=3.0):
    return drift(told, t) if floor <= drift(told, t) <= cap else 0.0


def whole(told, power=1.0):
    logs = math.fsum(q - g for q, g in zip(told.old, told.sampled, strict=True))
    return math.exp(power * logs)


def sequence_masked(told, t):
    return whole(told) if whole(told) <= 3.0 else 0.0


def mean_truncated(told, t):
    return min(whole(told, 1 / len(told.old)), 3.0)


def off_policy_masked(threshold):
    """Weigh a bad answer 0 that became unlikelier by more than the threshold, a token on average."""

    def weight(told, t):
        gone = [s - p for s, p in zip(told.sampled, told.logprobs, strict=True)]
        return 0.0 if told.advantage < 0 and sum(gone) / len(gone) > threshold else 1.0

    return weight


def weighted(loop, weight):
    def loop_(told):
        values, slopes = loop(told)
        weights = [weight(told, t) for t in range(len(values))]
        return [w * v for w, v in zip(weights, values, strict=True)], [
            [w * s for s in row] for w, row in zip(weights, slopes, strict=True)
        ]

    return loop_


def k1(told, t):
    return told.logprobs[t] - told.reference[t], 1.0


def k2(told, t):
    d = told.reference[t] - told.logprobs[t]
    return d * d / 2, -d


def k3(told, t):
    d = told.reference[t] - told.logprobs[t]
    return math.exp(d) - d - 1, 1 - math.exp(d)


def times_ratio(divergence):
    def one(told, t):
        ratio, (value, slope) = math.exp(told.logprobs[t] - told.old[t]), divergence(told, t)
        return ratio * value, ratio * value + ratio * slope

    return one


def with_kl(loop, divergence, beta):
    def loop_(told):
        values, slopes = loop(told)
        for t in range(len(values)):
            value, slope = divergence(told, t)
            values = [v + beta * value if s == t else v for s, v in enumerate(values)]
            slopes = [
                [x + beta * slope if s == t == row else x for s, x in enumerate(line)]
                for row, line in enumerate(slopes)
            ]
        return values, slopes

    return loop_
