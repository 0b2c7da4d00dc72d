"""One pass over the rows of a log: how bad is each, judged from what came before."""

from __future__ import annotations

import collections
import math

from stabil.curves._signal import LONGEST_ROWS, RETURN, THRESHOLD, Signal

# Mirrors of `stabil.vocabulary.Severity`, which lives beside arrays; a test holds the
# two together.
OK, WATCH, WARN, BLOCK = 0, 1, 2, 3

LOSS_FLOOR = 0.005  # losses within half a per cent of each other are the same
NORM_FLOOR = 0.05
LARGEST = 1e100  # losses beyond count as this, so that no sum overflows
SPARSE_STEPS = 3  # a row that stands for so many steps is evidence by itself
DRIFT = 2.0  # deviations that a row may lie above the level without being evidence
EVIDENCE = 9.0  # sum of the evidence that makes a rise last; three rows at 6
EVIDENCE_SPARSE = 7.0  # two rows at 6
LEAST_RISE = math.log(1.05)  # a lasting rise smaller than this is a change of data
LARGE_JUMP = math.log(1.5)
HUGE_JUMP = math.log(2.5)
EARLY_ROWS = 8  # values before which a blow-up is a jump of HUGE_JUMP
HUGE_SCORE = 20.0
ALONE = 16.0  # score of the loss that needs no support by the gradient
JOINT_LOSS, JOINT_NORM = 3.0, 6.0
SUPPORT = 4.0  # score of the gradient norm that supports a spike of the loss


class Judge:
    """Judges rows in the order of a log, each from the rows before it alone.

    Loss and gradient norm are judged on their logarithm by `Signal`; from the first
    negative loss on, the loss is judged as it is. Severity by rule:

      BLOCK  the loss or the gradient norm is not finite
      WARN   the loss rises and stays (the sum of min(z, 6) - 2 over its rows, which a
             row below the level sets to 0, reaches 9) by 5 % or more; or it stays for
             two rows at 2.5 times its level, or at 1.5 times with a spike of the
             gradient norm; or it jumps in the warm-up to 1.5 times its highest value
             (2.5 times in the first rows) and by more than its range so far; a spike
             that goes on
      WATCH  a single high loss, a spike of the gradient norm alone

    A row that stands for 3 steps or more has outlived them, and is evidence by itself:
    there WARN also needs only a sum of 7 and no least rise, or one high loss which the
    gradient norm supports (z > 4; z > 6 for a loss with z > 3) or which stands out by
    itself (1.5 times the level, z > 16; 2.5 times for a loss with z > 3), or one in a
    log without gradient norms.

    Args:
      threshold: score beyond which a value is a spike; in robust standard deviations.
      drift: score that is no evidence of a rise yet.
      floor: smallest standard deviation of the loss to believe, as a share of it.
      longest: rows after which a high loss or norm is taken as normal, flat or not.

    Attributes:
      loss: `Signal` of the loss.
      norm: `Signal` of the gradient norm.
      loss_score: z of the newest loss, 0 where it could not be judged.
      norm_score: z of the newest gradient norm, likewise.
      loss_severity: severity of the newest loss by itself; not BLOCK.
      nonfinite: which of the newest values were not finite: 1 loss + 2 gradient norm.

    Examples:
      >>> judge = Judge()
      >>> [judge.row(i, 2.0 + 0.01 * (i % 3)) for i in range(40)][-1]
      0
      >>> judge.row(40, 9.0), judge.row(41, float("nan")), judge.row(42, 2.0)
      (1, 3, 0)
    """

    __slots__ = (
        "loss norm loss_score norm_score loss_severity nonfinite linear _step "
        "_highest _lowest _distinct _evidence _stale _rises _event _threshold _drift "
        "_floor _longest"
    ).split()

    def __init__(
        self,
        *,
        threshold: float = THRESHOLD,
        drift: float = DRIFT,
        floor: float = LOSS_FLOOR,
        longest: int = LONGEST_ROWS,
    ) -> None:
        self._threshold, self._drift = threshold, drift
        self._floor, self._longest = floor, longest
        self.linear = False
        self._step = math.inf
        self.announce()
        self.loss_score = self.norm_score = 0.0
        self.nonfinite = self.loss_severity = 0

    def announce(self) -> None:
        """Learns loss and gradient norm afresh: data, schedule or batch size change."""
        self.loss = Signal(self._floor, self._threshold, self._longest)
        self.norm = Signal(NORM_FLOOR, self._threshold, self._longest)
        self._highest, self._lowest = -math.inf, math.inf
        self._distinct, self._evidence = 0, 0.0
        self._stale = math.nan
        self._rises = collections.deque([0.0, 0.0, 0.0], maxlen=3)
        self._event = False

    def row(self, step: float, loss: float, grad_norm: float | None = None) -> int:
        """Judges one row.

        Args:
          step: training step of the row; the distance to the row before says for how
            many steps the row stands.
          loss: the loss, in its own unit.
          grad_norm: L2 norm of the gradient, or None where the log has none.

        Returns:
          The severity: 0 ok, 1 watch, 2 warn, 3 block.
        """
        sparse = step - self._step >= SPARSE_STEPS
        self._step = step
        nonfinite, norm_score, found = 0, 0.0, OK
        if grad_norm is not None:
            if not -math.inf < grad_norm < math.inf:
                nonfinite = 2
            elif grad_norm > 0:
                norm_score = self.norm.step(math.log(grad_norm))
        self.loss_score, self.norm_score = 0.0, norm_score
        if not -math.inf < loss < math.inf:
            nonfinite += 1
        elif loss or self.linear:
            found = self._loss(loss, sparse, grad_norm is not None)
        self.loss_severity, self.nonfinite = found, nonfinite
        if nonfinite:
            return BLOCK
        return WATCH if not found and norm_score > self._threshold else found

    def _loss(self, loss: float, sparse: bool, has_norm: bool) -> int:
        signal = self.loss
        if loss < 0 and not self.linear:
            self.linear = True
            if signal.seen:
                signal.make_linear()
                self._highest = math.exp(self._highest)
                self._lowest = math.exp(self._lowest)
        if self.linear:
            unit = abs(signal.level) or 1.0
            signal.floor = self._floor * unit
            x = min(max(loss, -LARGEST), LARGEST)
        else:
            unit = 1.0
            x = math.log(loss)
        jump = (x - signal.level) / unit
        if not signal.armed:
            early = self._early(x, unit)
            signal.step(x)
            self._stale = loss
            return WARN if early else OK
        again = signal.excursion > 0
        z = self.loss_score = signal.step(x)
        if loss != self._stale:
            self._stale = loss
            if z > self._drift or self._evidence:
                self._gather(z, sparse)
        self._rises.append(jump)
        if z < RETURN and not self._event:
            return OK
        return self._high(z, jump, again or sparse, sparse, has_norm)

    def _gather(self, z: float, sparse: bool) -> None:
        """Adds the evidence of one score; a loss below the level clears it."""
        evidence = self._evidence + (min(z, self._threshold) - self._drift)
        if z < 0 or evidence < 0:
            self._evidence = 0.0
            return
        # One row of room above the limit, so that a return ends it soon.
        limit = EVIDENCE_SPARSE if sparse else EVIDENCE
        self._evidence = min(evidence, limit + self._threshold - self._drift)

    def _early(self, x: float, unit: float) -> bool:
        """Whether a loss of the warm-up blows up; the others widen the range."""
        self._distinct += x != self.loss.last
        least = LARGE_JUMP if self._distinct > EARLY_ROWS else HUGE_JUMP
        limit = self._highest + max(least * unit, self._highest - self._lowest)
        if self.loss.seen > 1 and x > limit:
            return True
        self._highest, self._lowest = max(x, self._highest), min(x, self._lowest)
        return False

    def _high(
        self, z: float, jump: float, again: bool, sparse: bool, has_norm: bool
    ) -> int:
        """Judges a loss that lies high, or that ends an event."""
        norm, out = self.norm_score, z > self._threshold
        warn = out and self._event
        if z > RETURN:
            if sparse:
                warn |= self._evidence >= EVIDENCE_SPARSE
                warn |= z > JOINT_LOSS and (norm > JOINT_NORM or jump > HUGE_JUMP)
                apart = jump > LARGE_JUMP or z > ALONE
                warn |= out and (not has_norm or norm > SUPPORT or apart)
            else:
                warn |= self._evidence >= EVIDENCE and min(self._rises) >= LEAST_RISE
            if again:
                warn |= out and jump > LARGE_JUMP and norm > self._threshold
                warn |= z > HUGE_SCORE and jump > HUGE_JUMP
        self._event = bool(self.loss.excursion) and (warn or self._event)
        if warn:
            return WARN
        return WATCH if out or self.loss.excursion else OK
