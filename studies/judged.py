"""Claims of the paper, judged: a difference between two settings with its 95 % interval over training seeds."""

import math
import statistics
from dataclasses import dataclass

from scipy.stats import t as student_t

from assay.outcome import Currency, Outcome, Setting
from assay.study.tables import Role, headline_settings


@dataclass(frozen=True)
class Gain:
    """How far one setting is ahead of another, and what is known of the variance of that.

    `variances` are pairs of a variance and the degrees of freedom that it was estimated with.
    """

    value: float
    variances: tuple[tuple[float, float], ...]

    @property
    def error(self) -> float:
        """The standard error."""
        return math.sqrt(sum(variance for variance, _ in self.variances))

    @property
    def interval(self) -> float:
        """Half of the 95 % interval, by Welch's t."""
        if self.error == 0:
            return 0.0
        inverse = sum((variance / self.error**2) ** 2 / degrees for variance, degrees in self.variances)
        return self.error * float(student_t.ppf(0.975, 1 / inverse if inverse else math.inf))

    def per(self, amount: float) -> "Gain":
        """The gain per unit."""
        return Gain(self.value / amount, tuple((var / amount**2, degrees) for var, degrees in self.variances))

    def minus(self, other: "Gain") -> "Gain":
        """The difference of two gains."""
        return Gain(self.value - other.value, self.variances + other.variances)


class Measured:
    """The settings of a study in one currency: means over seeds, and differences with their errors.

    The mean over n seeds varies by their deviation / sqrt(n); a setting with one seed is given the median of
    the others', in per cent. Scores also vary with the held-out images, which all models share.
    """

    def __init__(self, outcomes: list[Outcome], currency: Currency) -> None:
        self.form = currency.form
        self.of_samples = not currency.shared_error  # a score does not depend on how a model is sampled
        self.values: dict[Setting, list[float]] = {}
        self.shared: dict[Setting, float] = {}
        for outcome in outcomes:
            if (value := currency.value(outcome)) is not None:
                setting = outcome.setting.without_seed
                self.values.setdefault(setting, []).append(value)
                self.shared[setting] = (currency.error(outcome) or 0.0) if currency.shared_error else 0.0
        several = [values for values in self.values.values() if len(values) > 1]
        deviations = [statistics.stdev(values) / statistics.fmean(values) for values in several]
        self.usual = statistics.median(deviations) if deviations else math.nan

    def mean(self, setting: Setting) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values[setting])

    def gain(self, better: Setting, worse: Setting) -> Gain:
        """How far one setting is ahead of another."""
        variances = []
        for setting in (better, worse):
            values = self.values[setting]
            several = len(values) > 1
            deviation = statistics.stdev(values) if several else self.usual * self.mean(setting)
            variances.append((deviation**2 / len(values), len(values) - 1 if several else 2))
            variances.append((self.shared[setting] ** 2, math.inf))
        return Gain(self.mean(worse) - self.mean(better), tuple(variances))

    def verdict(self, gain: Gain) -> str:
        """Whether the 95 % interval of a gain lies above 0, below it, or on both sides."""
        if math.isnan(gain.interval):
            return ""  # no setting has two seeds
        word = "undecided" if abs(gain.value) <= gain.interval else "holds" if gain.value > 0 else "fails"
        return f"{word} ({gain.value:+{self.form}} ± {gain.interval:{self.form}})"

    def claims(self, sigma: float) -> dict[str, str]:
        """Each claim of the paper about a noise level in words, and its verdict; "" if it cannot be judged."""
        there = [setting for setting in self.values if setting.levels in ((), (sigma,))]
        roles, found = headline_settings(there), dict[str, str]()
        for words, better, worse in CLAIMS:
            pair = [roles[role] for role in (better, worse) if role in roles]
            known = len(pair) == 2 and (self.of_samples or "noisy_truncated" not in (better, worse))
            found[words] = self.verdict(self.gain(*pair)) if known else ""
        mixes = sorted(s for s in there if s.table == "clean_mix" and s.noisy and s.num_clean)
        found[FEW_CLEAN] = ""
        if len(mixes) > 2 and "all_clean" in roles:
            first, last = (
                self.gain(more, fewer).per(100 * (_clean_part(more) - _clean_part(fewer)))
                for more, fewer in (mixes[-2:], (roles["all_clean"], mixes[0]))
            )
            found[FEW_CLEAN] = self.verdict(first.minus(last))
        return found


CLAIMS: tuple[tuple[str, Role, Role], ...] = (
    ("all clean images beat the mix", "all_clean", "mix"),
    ("the mix beats its clean images alone", "mix", "few_clean"),
    ("the mix beats noisy images alone, full sampling", "mix", "noisy"),
    ("the mix beats noisy images alone, truncated sampling", "mix", "noisy_truncated"),
    ("the mix beats noisy images alone, consistency", "mix", "noisy_consistent"),
    ("noisy images alone: truncated sampling beats full sampling", "noisy_truncated", "noisy"),
    ("noisy images alone: consistency beats full sampling", "noisy_consistent", "noisy"),
    ("noisy images alone: consistency beats truncated sampling", "noisy_consistent", "noisy_truncated"),
)
FEW_CLEAN = "a clean image more helps most where there are few (gain per percent of clean images)"


def _clean_part(setting: Setting) -> float:
    assert setting.clean_fraction is not None
    return setting.clean_fraction
