"""Energy of a device's radio for one request, in joules: the model of Huang et al. (MobiSys 2012).

P = up · (Mbit/s up) + down · (Mbit/s down) + base, in mW while bytes move. Multiplied by the time that the bytes take,
the first two terms no longer depend on the rate: they are an energy per bit. Before the first byte the radio is
promoted, after the last it stays up for its tail; both are charged once per request, as for an isolated request. Where
requests follow each other faster than the tail, give the tail that is really spent (`tail_s`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from edgesplit.plan import Power

_BITS = 8
_MILLI = 1e-3
_MEGA = 1e6

Figure = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Radio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parameters of the model, in the units of the paper."""

    up_mw_per_mbps: Figure
    down_mw_per_mbps: Figure
    base_mw: Figure
    promotion_s: Figure = 0.0
    promotion_mw: Figure = 0.0
    tail_s: Figure = 0.0
    tail_mw: Figure = 0.0

    @property
    def wake_joules(self) -> float:
        """Joules of promotion and tail of one request."""
        return (self.promotion_s * self.promotion_mw + self.tail_s * self.tail_mw) * _MILLI

    def power(self, idle_watts: float, busy_watts: float) -> Power:
        """The device's power model, given what the rest of it draws while it waits and while it encodes."""
        return Power(
            idle_watts=idle_watts,
            busy_watts=busy_watts,
            radio_watts=self.base_mw * _MILLI,
            up_joules_per_byte=self.up_mw_per_mbps * _MILLI * _BITS / _MEGA,
            down_joules_per_byte=self.down_mw_per_mbps * _MILLI * _BITS / _MEGA,
            wake_joules=self.wake_joules,
        )


# Huang et al., "A close examination of performance and power characteristics of 4G LTE networks", MobiSys 2012: rates
# as JointDNN's table 3 gives them; promotion and tail from the paper's table of states. A phone's radio, not a board's.
RADIOS: Final[dict[str, Radio]] = {
    "wifi": Radio(
        up_mw_per_mbps=283.17, down_mw_per_mbps=137.01, base_mw=132.86,
        promotion_s=0.0791, promotion_mw=124.4, tail_s=0.2381, tail_mw=119.3,
    ),
    "lte": Radio(
        up_mw_per_mbps=438.39, down_mw_per_mbps=51.97, base_mw=1288.04,
        promotion_s=0.2601, promotion_mw=1210.7, tail_s=11.576, tail_mw=1060.0,
    ),
    # Its two tails (DCH 8.088 s at 803.9 mW, FACH 0.8242 s at 601.3 mW) as one of the same length and energy.
    "3g": Radio(
        up_mw_per_mbps=868.98, down_mw_per_mbps=122.12, base_mw=817.88, promotion_s=0.5821, promotion_mw=659.4,
        tail_s=8.088 + 0.8242, tail_mw=(8.088 * 803.9 + 0.8242 * 601.3) / (8.088 + 0.8242),
    ),
}  # fmt: skip
