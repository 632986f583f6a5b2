"""Whether FSDP2 runs a plan by itself. Here, so that who only counts bytes need not import it."""

from __future__ import annotations

from zpp_lab.collectives.plan import Plan
from zpp_lab.collectives.recipe import quantizes_any


def is_untouched(plan: Plan, ordered: bool) -> bool:
    """Whether the recipe asks for nothing that FSDP2 itself does not do."""
    config = plan.recipe.config
    if plan.stored:
        return False
    if config.shard == "node":
        if ordered:
            raise ValueError(
                "engine.ordered=true with recipe.shard=node: FSDP2 sums over nodes in its own "
                "order; set engine.ordered=false, or recipe.shard=world recipe.hops=2"
            )
        return True
    plain = not config.secondary and config.hops == 1 and config.order == "rank"
    asked = ordered or not plain or quantizes_any(plan.recipe)
    return plan.recipe.cluster.world == 1 or not asked
