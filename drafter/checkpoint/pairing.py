"""Whether a drafter was made for a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_wire.errors import ConfigError
from drafter.eagle3.model import Eagle3Model
from drafter.model import DraftModel


def pair_values(model: DraftModel | Eagle3Model) -> dict[str, int]:
    """The values of a draft model that must be the target's too; depth only where the checkpoint tells."""
    values = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size}
    if model.settings.num_target_layers is not None:
        values["num_target_layers"] = model.settings.num_target_layers
    return values


def check_values(
    drafter: Mapping[str, int], target: Mapping[str, int], taps: Sequence[int]
) -> None:
    """Refuse a drafter that was not made for this target.

    Args:
        drafter: of ``pair_values``.
        target: the same, all of it.
        taps: layers that the drafter reads.

    Raises:
        ConfigError: naming both values that differ.
    """
    for name, ours in target.items():
        theirs = drafter.get(name, ours)
        if theirs != ours:
            raise ConfigError(
                f"target and drafter do not match: {name} is {ours} in the target and "
                f"{theirs} in the drafter"
            )
    # What lies behind the last layer is the final norm's business: its output is no feature.
    last = target["num_target_layers"] - 2
    if taps and max(taps) > last:
        raise ConfigError(
            f"the drafter taps layer {max(taps)}, but the target's last tappable layer is {last}"
        )
