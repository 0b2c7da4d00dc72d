"""The learning rate's scale: cut at once, back by degrees."""

from __future__ import annotations

from typing import Any

_STAGES = 10  # so that a return sends ten scalars to the device and not hundreds


class Rate:
    """A factor in `[lowest, 1]` that is cut and then returns to 1 in ten equal ratios.

    Only quiet steps count towards the return.

    Examples:
      >>> rate = Rate(0.1)
      >>> rate.cut(0.5, 20)
      >>> [rate.ease(True) for _ in range(20)].count(True), rate.scale
      (1, 1.0)
    """

    def __init__(self, lowest: float):
        if not 0 < lowest < 1:
            raise ValueError(
                f"Ladder: needed 0 < lowest_scale < 1, got {lowest}; 0.1 lets the "
                "learning rate fall to a tenth"
            )
        self._lowest = lowest
        self._cut_to, self._passed, self._steps = 1.0, 0, 1
        self.scale = 1.0

    @property
    def is_lowest(self) -> bool:
        return self.scale <= self._lowest

    def cut(self, factor: float, steps: int) -> None:
        """Multiplies the scale; it is back at 1 after `steps` quiet steps."""
        self.scale = self._cut_to = max(self._lowest, self.scale * factor)
        self._passed, self._steps = 0, steps

    def ease(self, quiet: bool) -> bool:
        """Counts one step; True on the step that completes the return."""
        if self.scale == 1.0 or not quiet:
            return False
        self._passed += 1
        stage = min(_STAGES, self._passed * _STAGES // self._steps)
        self.scale = self._cut_to ** (1 - stage / _STAGES)
        return self.scale == 1.0

    def get_state(self) -> dict[str, Any]:
        return dict(
            scale=self.scale,
            cut_to=self._cut_to,
            passed=self._passed,
            steps=self._steps,
        )

    def set_state(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._cut_to = float(state["cut_to"])
        self._passed, self._steps = int(state["passed"]), int(state["steps"])
