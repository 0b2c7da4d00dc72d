"""The few scalars that the host may change on the device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from stabil.vocabulary import Controls


class ControlBoard:
    """Holds the newest `Controls` and makes new arrays only for values that change."""

    def __init__(self):
        self.controls = Controls.untouched()
        self._values = (1.0, False, 0)

    def set(self, learning_rate_scale: float, reset: bool, probe_level: int) -> None:
        """Sets the values for the next step; sends nothing that is there already."""
        values = (learning_rate_scale, reset, probe_level)
        kinds = (np.float32, np.bool_, np.int32)
        self.controls = Controls(
            *(
                array if new == old else jnp.asarray(kind(new))
                for array, new, old, kind in zip(
                    self.controls, values, self._values, kinds, strict=True
                )
            )
        )
        self._values = values
