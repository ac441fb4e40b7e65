"""Aux layer ids: a head's capture points in the convention of SGLang's target models.

A capture point i is the output of layer i-1 (the embedding output for i = 0); heads and vLLM count these.
SGLang's ``set_eagle3_layers_to_capture`` adds 1 to the ids it is given, with exceptions by model.
"""

from __future__ import annotations

from typing import Optional, Sequence

from sgl_peagle.errors import PEagleError


def capture_points(aux_layer_ids: Optional[Sequence[int]], num_target_layers: int) -> tuple[int, ...]:
    """The capture points of a head on a target of ``num_target_layers`` layers.

    Args:
        aux_layer_ids: The head's own, or None for EAGLE-3's default ``(2, L//2, L-3)``.
        num_target_layers: L.

    Raises:
        PEagleError: A point outside the target, or defaults that coincide on a shallow target.
    """
    points = tuple(aux_layer_ids or (2, num_target_layers // 2, num_target_layers - 3))
    if len(set(points)) != len(points) or list(points) != sorted(points):
        raise PEagleError(
            f"the default aux layers {list(points)} of a target with {num_target_layers} layers are not distinct and "
            "ascending",
            "the head's config names none, and the defaults need a deeper target",
            "add eagle_aux_hidden_state_layer_ids to the head's config.json",
        )
    if points[-1] > num_target_layers:
        raise PEagleError(
            f"aux layer id {points[-1]} is beyond the target's {num_target_layers} layers",
            "the head was trained on a deeper target",
            "serve the head with the target it was trained for (check --model-path)",
        )
    return points


def to_sglang(points: Sequence[int], target_architecture: str, num_target_layers: int) -> list[int]:
    """Ids to hand to ``set_eagle3_layers_to_capture`` so that ``points`` are captured (SGLang 0.5.23).

    Raises:
        PEagleError: The target's model class cannot capture a point.
    """
    ids = list(points)
    if target_architecture == "GptOssForCausalLM":
        # gpt_oss takes the list as it is when its largest id is the layer count, else adds 1.
        if max(ids) == num_target_layers:
            return ids
    elif max(ids) == num_target_layers:
        raise PEagleError(
            f"aux layer id {num_target_layers} (output of the last layer) on {target_architecture}",
            "SGLang's model captures the input of a layer, so the last layer's output is out of its reach",
            "use a head whose aux layers are all below the last",
        )
    return [i - 1 for i in ids]
