"""What share of a token's time its bytes alone would take, at the bandwidth that was measured when the server began."""

from __future__ import annotations

from dataclasses import dataclass

from bytefloor.model.step import Step


@dataclass(frozen=True)
class Floor:
    """Of one model on one device. gb_s: the stream limit, 10^9 bytes a second. budget: as in ``CachePlan``."""

    step: Step
    gb_s: float
    budget: int | None = None

    def share(self, n_prompt: int, n_generated: int, decode_s: float) -> float | None:
        """Time the bytes need / time it took, over the tokens after the first, at the answer's middle depth.

        The bytes are those of a token alone: the weights and its own live cache. So an answer that shared its steps
        with others has a lower share than the device had. None where there is no token after the first.
        """
        if n_generated < 2 or not decode_s > 0:
            return None
        dropped = 0 if self.budget is None else max(0, n_prompt - self.budget)
        n_bytes = sum(self.step.token_bytes(n_prompt + n_generated // 2, dropped))
        return n_bytes * (n_generated - 1) / (self.gb_s * 1e9 * decode_s)
