"""What launches depend on of each kind of card that kernels compile for."""

from __future__ import annotations

from bytefloor.engine.launches import Card

KB = 1024
CARDS = {
    "sm_80": Card(108, 164 * KB),
    "sm_86": Card(84, 100 * KB),
    "sm_89": Card(128, 100 * KB),
    "sm_90a": Card(132, 228 * KB),
    "sm_100a": Card(148, 228 * KB),
    "sm_120a": Card(170, 100 * KB),
}
